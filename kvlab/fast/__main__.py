"""Compile, ahead of time, the CPU kernels that the workshop models use: `python -m kvlab.fast`.

They are kept on disk, so that no first decode step has to wait for the compiler.
"""

import torch

from ..models import ModelShape, load
from ..store.exact import Exact
from ..store.float8 import Float8
from ..store.growing import Growing, GrowingState
from ..store.int import Int
from ..store.planes import Planes
from .attend import attend_packed, fits

HELD = 8  # tokens to attend to; any number compiles the same code


def compile_for(shape: ModelShape, form: Exact) -> bool:
    """Whether a format is decoded through a kernel; if so, it is compiled and on disk now."""
    held = GrowingState(Growing(form))
    held.append(*torch.randn(2, 1, shape.kv_heads, HELD, shape.head_dim))
    query = torch.randn(1, shape.heads, 1, shape.head_dim)
    if not fits(held, query):
        return False
    attend_packed(query, held, shape.head_dim**-0.5)
    return True


def main() -> None:
    shape = ModelShape.of(load()[0])
    for form in (Int(8), Int(4), Float8(), Planes(5)):  # the last one's kernel reads many others
        compile_for(shape, form)


if __name__ == "__main__":
    main()
