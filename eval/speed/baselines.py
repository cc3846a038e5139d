"""Today's baselines: transformers' own caches and, where it is built, llama.cpp, timed beside kvlab's methods
in the same run."""

from __future__ import annotations

from kvlab.extras import version

BASELINES = {
    "hf-dynamic": "transformers' DynamicCache through generate (sdpa)",
    "hf-static": "transformers' StaticCache of the context's length through generate (sdpa)",
    "hf-quantized": "transformers' QuantizedCache, backend fp8, through generate (sdpa)",
    "hf-quanto": "transformers' QuantizedCache, backend quanto, 4 bits, through generate (sdpa)",
    "hf-hqq": "transformers' QuantizedCache, backend hqq, 4 bits, through generate (sdpa)",
    "llama-f32": "llama.cpp, K and V in fp32",
    "llama-f32-flash": "llama.cpp, K and V in fp32, flash attention",
    "llama-q8_0": "llama.cpp, K and V in q8_0, flash attention",
    "llama-q4_0": "llama.cpp, K and V in q4_0, flash attention",
}
LLAMA = "llama-"  # how names of llama.cpp's begin
QUANTIZED = {  # what their QuantizedCache is made with
    "hf-quantized": {"backend": "fp8"},
    "hf-quanto": {"backend": "quanto", "nbits": 4},
    "hf-hqq": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
}
PACKAGES = {"hf-quanto": "optimum-quanto", "hf-hqq": "hqq"}


def baselines(llama: bool = False) -> list[str]:
    """The baselines whose package is installed; llama: those of llama.cpp among them."""
    found = [name for name in BASELINES if name not in PACKAGES or version(PACKAGES[name])]
    return [name for name in found if llama or not name.startswith(LLAMA)]


def cache_of(kind: str, config, tokens: int):
    """A baseline's cache for so many tokens of a model of this configuration."""
    from transformers import DynamicCache, QuantizedCache, StaticCache

    if kind == "hf-static":
        return StaticCache(config=config, max_cache_len=tokens)
    if kind in QUANTIZED:
        return QuantizedCache(config=config, **QUANTIZED[kind])
    return DynamicCache(config=config)
