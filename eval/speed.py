"""Speed: prefill and decode times of every method beside what people use today, in the same run.

One process per method, all alive together; at each context every method is measured once, then all
again (interleaved repeats), so that a busy minute of the machine hits all of them. Threads are fixed.

    prefill_ms   prompt of (context - STEPS) tokens, one row: median over repeats
    decode_ms    one token: median over the steps of all repeats; decode_ms_min and _max are the
                 smallest and largest of the repeats' own medians
    bytes        allocated by the cache after the last step, on device and host; moved by that step
    read_gbps    bytes a step must read (weights once, cache as held, bytes moved) / its time, 10^9 B/s
    fraction_of_bandwidth   read_gbps / the machine's measured read bandwidth

`hf-dynamic`, `hf-static` and `hf-quantized` are transformers' DynamicCache, StaticCache (as long as
the context) and QuantizedCache (backend fp8, which needs no further package), through `generate`
with transformers' own sdpa attention on a model of its own. `hf-quanto` and `hf-hqq` are the
QuantizedCache's other backends, measured where optimum-quanto or hqq is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import torch

import kvlab
from kvlab.arithmetic import read_bandwidth
from kvlab.models import source_of

STEPS = 16  # tokens decoded per repeat
STEPS_RECOMPUTE = 3  # the same for `recompute`, where each step costs a prefill
REPEATS = 2
CONTEXTS = {"model": (256, 512, 1024, 2048), "wide": (1024, 2048, 4096, 8192, 16384)}
BASELINES = {
    "hf-dynamic": "transformers' DynamicCache through generate (sdpa)",
    "hf-static": "transformers' StaticCache of the context's length through generate (sdpa)",
    "hf-quantized": "transformers' QuantizedCache, backend fp8, through generate (sdpa)",
    "hf-quanto": "transformers' QuantizedCache, backend quanto, 4 bits, through generate (sdpa)",
    "hf-hqq": "transformers' QuantizedCache, backend hqq, 4 bits, through generate (sdpa)",
}
QUANTIZED = {  # what their QuantizedCache is made with
    "hf-quantized": {"backend": "fp8"},
    "hf-quanto": {"backend": "quanto", "nbits": 4},
    "hf-hqq": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
}
PACKAGES = {"hf-quanto": "optimum-quanto", "hf-hqq": "hqq"}
WIDE = "wide-random"  # name of the wide suite's model in results


def baselines() -> list[str]:
    """The baselines whose package is installed."""

    def there(name: str) -> bool:
        try:
            return name not in PACKAGES or bool(version(PACKAGES[name]))
        except PackageNotFoundError:
            return False

    return [name for name in BASELINES if there(name)]


def wide_config():
    """The wide suite's Llama: 4 layers, hidden 1024, 8 heads of 128, random weights."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=max(CONTEXTS["wide"]),
        tie_word_embeddings=True,
    )


def load(options: dict, attention: str):
    """The model to time, in eval mode: options name `suite`, `model`, `device`, `dtype`."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if options["suite"] == "wide":
        torch.manual_seed(0)
        model = LlamaForCausalLM(wide_config()).to(device).eval()
        if options.get("dtype"):
            model = model.to(getattr(torch, options["dtype"]))
        if attention == "kvlab":
            kvlab.prepare(model)
        else:
            model.set_attn_implementation(attention)
        return model
    if attention == "kvlab":
        return kvlab.load(options["model"], device=device, dtype=options.get("dtype"))[0]
    dtype = options.get("dtype") or ("float32" if device == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(
        source_of(options["model"]), attn_implementation=attention, dtype=dtype
    )
    return model.to(device).eval()


def prompt(model, context: int) -> torch.Tensor:
    """Random token ids `[1, context - STEPS]`, the same for every method."""
    generator = torch.Generator().manual_seed(context)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, context - STEPS), generator=generator).to(model.device)


def weight_bytes(model) -> int:
    """Bytes of weights that a decode step reads: all but an input embedding of its own (one row)."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight.data_ptr() == table.data_ptr()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if tied else total - table.numel() * table.element_size()


def tensor_bytes(cache) -> int:
    """Bytes of the storages that a transformers cache's layers hold."""
    found = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, torch.Tensor):
                    for part in plain(item):
                        storage = part.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one is made of: itself, or those inside a subclass, as quanto's packed ones."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inside for part in plain(one)]


class Ours:
    """One kvlab method, timed with kvlab's own loop."""

    def __init__(self, options: dict):
        self.model, self.method = load(options, "kvlab"), options["method"]

    def measure(self, context: int) -> dict:
        cache = kvlab.make_cache(self.model, self.method)
        steps = STEPS_RECOMPUTE if cache.recompute else STEPS
        trace = kvlab.decode(self.model, prompt(self.model, context), cache, steps + 1)
        return {
            "prefill_ms": trace.ms[0],
            "steps_ms": trace.ms[1:],
            "device_bytes": trace.device_bytes[-1],
            "host_bytes": trace.host_bytes[-1],
            "moved_bytes": trace.moved_bytes[-1],
            "tokens_held": trace.tokens_held[-1],
        }


class Theirs:
    """One transformers cache, timed through `generate` with a time stamp after every token."""

    def __init__(self, options: dict):
        self.model, self.kind = load(options, "sdpa"), options["method"]

    def _cache(self, context: int):
        from transformers import DynamicCache, QuantizedCache, StaticCache

        if self.kind == "hf-static":
            return StaticCache(config=self.model.config, max_cache_len=context + 1)
        if self.kind in QUANTIZED:
            return QuantizedCache(config=self.model.config, **QUANTIZED[self.kind])
        return DynamicCache(config=self.model.config)

    def measure(self, context: int) -> dict:
        from transformers import StoppingCriteria, StoppingCriteriaList

        stamps: list[float] = []

        class Stamp(StoppingCriteria):
            def __call__(self, ids, scores, **kwargs):
                if ids.device.type == "cuda":
                    torch.cuda.synchronize(ids.device)
                stamps.append(time.perf_counter())
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids, cache = prompt(self.model, context), self._cache(context)
        started = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=STEPS + 1,
            min_new_tokens=STEPS + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Stamp()]),
        )
        return {
            "prefill_ms": (stamps[0] - started) * 1e3,
            "steps_ms": [(b - a) * 1e3 for a, b in pairwise(stamps)],
            "device_bytes": tensor_bytes(cache),
            "host_bytes": 0,
            "moved_bytes": 0,
            "tokens_held": ids.shape[1] + STEPS,
        }


def setup(options: dict, report: Callable) -> Callable:
    """A worker's handler: a context -> one repeat's measurements; "about" -> what it stands on."""
    kind = Theirs if options["method"] in BASELINES else Ours
    timed = kind(options)
    config = timed.model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(CONTEXTS["wide"])
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    timed.measure(min(64, longest))  # first-use costs fall here

    def handle(job):
        if job == "bandwidth":
            return read_bandwidth(0.5, timed.model.device)
        if job == "about":
            size = timed.model.dtype.itemsize
            return {
                "longest": longest,
                "weight_bytes": weight_bytes(timed.model),
                "token_bytes": 2 * config.num_hidden_layers * heads * head_dim * size,
                "device": str(timed.model.device),
            }
        return timed.measure(job)

    return handle


def summarize(context: int, found: list[dict], about: dict, bandwidth: float) -> dict:
    """One row of speed.json from the repeats of one method at one context."""
    steps = [ms for one in found for ms in one["steps_ms"]]
    medians = [statistics.median(one["steps_ms"]) for one in found]
    prefill = [one["prefill_ms"] for one in found]
    last, decode = found[-1], statistics.median(steps)
    held = min(last["device_bytes"], last["tokens_held"] * about["token_bytes"])
    read = about["weight_bytes"] + held + last["moved_bytes"]
    rate = read / (decode / 1e3)
    return {
        "context": context,
        "prefill_ms": statistics.median(prefill),
        "decode_ms": decode,
        "device_bytes": last["device_bytes"],
        "host_bytes": last["host_bytes"],
        "moved_bytes": last["moved_bytes"],
        "fraction_of_bandwidth": rate / bandwidth,
        "prefill_ms_min": min(prefill),
        "prefill_ms_max": max(prefill),
        "decode_ms_min": min(medians),
        "decode_ms_max": max(medians),
        "read_gbps": rate / 1e9,
        "bandwidth_gbps": bandwidth / 1e9,
        "tokens_held": last["tokens_held"],
        "repeats": len(found),
    }
