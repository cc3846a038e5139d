"""kvpress's side, in its own environment: `python -m eval.peers.theirs JOB`, see `side.py`."""

from __future__ import annotations

import copy
import tempfile
from contextlib import nullcontext

import torch

from .side import serve


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


def load(job: dict):
    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    unknown = sorted(set(kvpress.__all__) - set(job["presses"]))
    if unknown:
        raise SystemExit(f"kvpress has presses that eval/peers/pairs.py does not name: {', '.join(unknown)}")
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
    serve(load)
