"""Compile, ahead of time, the CPU kernels that the workshop models use: `python -m kvlab.kernels`.

They are kept on disk, so that no first decode step has to wait for the compiler.
"""

import torch

from .. import make_cache
from ..measure.machines import fill_random
from ..models import ModelShape, load
from .attend import attend_packed, fits

HELD = 8  # tokens to attend to; any number compiles the same code


def compile_for(model, method: str) -> bool:
    """Whether the method decodes through a kernel; if so, it is compiled and on disk now."""
    cache, shape = make_cache(model, method), ModelShape.of(model)
    fill_random(model, cache, HELD)
    held, query = cache.layers[0].store, torch.randn(1, shape.heads, 1, shape.head_dim)
    if not fits(held, query):
        return False
    attend_packed(query, held, shape.head_dim**-0.5)
    return True


def main() -> None:
    model, _ = load()
    for method in ("int8", "int4", "fp8"):
        compile_for(model, method)


if __name__ == "__main__":
    main()
