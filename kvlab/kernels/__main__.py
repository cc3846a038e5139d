"""Compile, ahead of time, the CPU kernels that the workshop models use: `python -m kvlab.kernels`.

They are kept on disk, so that no first decode step has to wait for the compiler.
"""

import torch

from .. import make_cache
from ..models import load
from .attend import attend_packed, fits

HELD = 8  # tokens to attend to; any number compiles the same code


def compile_for(model, method: str) -> bool:
    """Whether the method decodes through a kernel; if so, it is compiled and on disk now."""
    cache, config = make_cache(model, method), model.config
    head_dim = config.hidden_size // config.num_attention_heads
    store = cache.layers[0].store
    store.append(*torch.randn(2, 1, config.num_attention_heads, HELD, head_dim))
    query = torch.randn(1, config.num_attention_heads, 1, head_dim)
    if not fits(store, query):
        return False
    attend_packed(query, store, head_dim**-0.5)
    return True


def main() -> None:
    model, _ = load()
    for method in ("int8", "int4", "fp8"):
        compile_for(model, method)


if __name__ == "__main__":
    main()
