"""The steps of both sides for a document: prefill, compress, feed the question, score the answers.

Either side is a process of its own, told by a file what to do: `python -m eval.reproduce.sides SIDE JOB`. At
its top this module needs nothing but torch: kvpress's side runs in its own environment.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def serve(load: Callable[[dict], Callable[[dict], object]], job: Path) -> None:
    """Read a job's file, and write what its runs found to the file beside it that it names.

    A job has `documents`, each with `ids`, `cut` (tokens that are compressed), `choices` (token ids each) and
    `kept` (tokens that stay); `runs`; `found`, the other file; and what `load` needs; it returns what makes
    a run's side: `prefill(ids, kept) -> cache`, `step(cache, token, place) -> logits [vocabulary]`,
    `size(cache) -> bytes`, `copy(cache)`, and `held(cache, ids, kept)`: the positions of the prompt that are
    held, by layer and head.
    """
    job = json.loads(job.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    start, told = load(job), []
    for run in job["runs"]:
        try:
            side = start(run)
            answered(side, job["documents"][0])  # what is compiled or allocated once is not timed
            told.append({"documents": [answered(side, document) for document in job["documents"]]})
        except Exception as error:
            told.append({"error": f"{type(error).__name__}: {error}"})
    Path(job["found"]).write_text(json.dumps(told), encoding="utf-8")


@torch.inference_mode()
def answered(side, document: dict) -> dict:
    """One document through one side: log-probability of every choice, what stayed, CPU seconds, bytes."""
    ids, cut = document["ids"], document["cut"]
    prompt, count = torch.tensor([ids[:cut]]), document["kept"]
    before = watch()
    began = time.process_time()
    cache = side.prefill(prompt, count)
    seconds, steps, size = time.process_time() - began, [], side.size(cache)
    for place in range(cut, len(ids)):
        began = time.process_time()
        logits = side.step(cache, ids[place], place)
        steps.append(time.process_time() - began)
    peak = peak_since(before)
    first, scores = logits.float().log_softmax(-1), []
    for choice in document["choices"]:
        score, mine = first[choice[0]].item(), side.copy(cache) if len(choice) > 1 else None
        for index in range(1, len(choice)):
            logits = side.step(mine, choice[index - 1], len(ids) + index - 1)
            score += logits.float().log_softmax(-1)[choice[index]].item()
        scores.append(score)
    held = side.held(cache, prompt, count)
    return {
        "scores": scores, "held": held, "bytes": size, "prefill": seconds, "step": median(steps), "peak": peak
    }  # fmt: skip


def watch() -> int | None:
    """Bytes that the process holds now, from where its peak is watched; None where no file says it."""
    try:
        FORGET.write_text("5")
        return memory("VmRSS")
    except OSError:
        return None


def peak_since(before: int | None) -> int | None:
    """Bytes that the process held at most since `watch`, beyond what it held then."""
    return None if before is None else max(0, memory("VmHWM") - before)


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


class Ours:
    """A method on a loaded model. method: without its budget, unless it has none."""

    def __init__(self, model, method: str):
        self.model, self.method = model, method

    def prefill(self, ids: torch.Tensor, kept: int):
        import kvlab

        method = self.method
        if method != "full":
            method += f"{',' if ':' in method else ':'}budget={kept}"
        cache = kvlab.make_cache(self.model, method)
        stepper = kvlab.Stepper(self.model, cache)
        stepper.feed(ids, last=True)
        cache.hold()
        return stepper

    def step(self, stepper, token: int, place: int) -> torch.Tensor:
        return stepper.feed(torch.tensor([[token]]), last=True)[0]

    def held(self, stepper, ids: torch.Tensor, kept: int) -> list[list[list[int]]]:
        return [
            [sorted(at for at in head if 0 <= at < ids.shape[1]) for head in layer.positions[0].tolist()]
            for layer in stepper.cache.layers
        ]

    def size(self, stepper) -> int:
        return stepper.cache.stats().device_bytes

    def copy(self, stepper):
        return copy.deepcopy(stepper, {id(self.model): self.model})


class Theirs:
    """A press on a loaded model; None is transformers' own cache."""

    def __init__(self, kvpress, model, press: dict | None, ratio: float):
        self.kvpress, self.model, self.ratio = kvpress, model, ratio
        self.press = None if press is None else self.made(press)
        self.moves = isinstance(self.press, kvpress.KeyRerotationPress)

    def made(self, press: dict):
        """{class: parameters}, or a press within a press, as an object; the innermost gets the ratio."""
        ((name, given),) = press.items()
        given = {key: self.made(value) if isinstance(value, dict) else value for key, value in given.items()}
        if "press" not in given:
            given["compression_ratio"] = self.ratio
        return getattr(self.kvpress, name)(**given)

    def prefill(self, ids: torch.Tensor, kept: int):
        from transformers import DynamicCache

        cache, length = DynamicCache(), ids.shape[1]
        if isinstance(self.press, self.kvpress.KVzipPress):  # it rounds the number of all that go down
            self.press.compression_ratio = 1 - kept / length + 1e-9
        with nullcontext() if self.press is None else self.press(self.model):
            self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        self.gone = length - cache.layers[0].keys.shape[2] if self.moves else 0
        return cache

    def step(self, cache, token: int, place: int) -> torch.Tensor:
        ids, at = torch.tensor([[token]]), torch.tensor([[place - self.gone]])
        return self.model(input_ids=ids, position_ids=at, past_key_values=cache, logits_to_keep=1).logits[
            0, -1
        ]

    def held(self, cache, ids: torch.Tensor, kept: int) -> list[list[list[int]]]:
        """The prompt is compressed once more, and what its press drops is noted."""
        with Noted(self) as noted:
            cache = self.prefill(ids, kept)
        return [noted.of(index, layer.keys[0]) for index, layer in enumerate(cache.layers)]

    def size(self, cache) -> int:
        tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    def copy(self, cache):
        return copy.deepcopy(cache)


class Noted:
    """What the layers of a side held before its press, `keys`, and the places it moved keys from, `moved`."""

    def __init__(self, side: Theirs):
        self.side, self.hooks, self.keys, self.moved = side, [], {}, {}
        self.kind = side.kvpress.KeyRerotationPress
        self.rerotate = self.kind.rerotate_keys

    def __enter__(self) -> Noted:
        for layer in self.side.model.model.layers:  # before the press's own hooks
            self.hooks.append(layer.self_attn.register_forward_hook(self.note, with_kwargs=True))
        self.kind.rerotate_keys = staticmethod(self.note_places)
        return self

    def __exit__(self, *_) -> None:
        self.kind.rerotate_keys = staticmethod(self.rerotate)
        for hook in self.hooks:
            hook.remove()

    def note(self, module, _, kwargs, output) -> None:
        index = module.layer_idx
        self.keys.setdefault(index, kwargs["past_key_values"].layers[index].keys[0])

    def note_places(self, module, indices, keys):
        self.moved[module.layer_idx] = indices[0]
        return self.rerotate(module, indices, keys)

    def of(self, index: int, keys: torch.Tensor) -> list[list[int]]:
        """Positions that a layer's heads still hold, by its keys `[kv_heads, held, head_dim]`."""
        module = self.side.model.model.layers[index].self_attn
        if index in self.moved:
            return [sorted(head) for head in self.moved[index].tolist()]
        if (masked := getattr(module, "masked_key_indices", None)) is not None:  # AdaKV, KVzip: nothing goes
            stays = torch.ones(keys.shape[:2], dtype=torch.bool)
            stays[masked[1], masked[2]] = False
            return [head.nonzero()[:, 0].tolist() for head in stays]
        same = (keys[:, :, None] == self.keys[index][:, None]).all(-1)  # [kv_heads, held, tokens]
        if not bool(same.any(-1).all()):
            raise ValueError(f"layer {index} holds keys that the model never made")
        return [sorted(head) for head in same.int().argmax(-1).tolist()]


def ours(job: dict) -> Callable[[dict], Ours]:
    import kvlab

    model, _ = kvlab.load(job["model"], device="cpu", dtype="float32")
    return lambda run: Ours(model, run["method"])


def theirs(job: dict) -> Callable[[dict], Theirs]:
    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template = None  # KVzip loads it by the model's name, and would drop a template's prefix
    plain = tempfile.mkdtemp()
    tokenizer.save_pretrained(plain)
    model.config._name_or_path = plain

    def start(run: dict) -> Theirs:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        model.set_attn_implementation("eager" if run["eager"] else "sdpa")
        return Theirs(kvpress, model, run["press"], job["ratio"])

    return start


if __name__ == "__main__":
    serve({"ours": ours, "theirs": theirs}[sys.argv[1]], Path(sys.argv[2]))
