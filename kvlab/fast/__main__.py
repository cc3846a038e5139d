"""Compile, ahead of time, the CPU kernels that the workshop models use: `python -m kvlab.fast`.

They are kept on disk, so that no first decode step has to wait for the compiler.
"""

import torch

from ..decode import decode
from ..make import load, make_cache

METHODS = ("full", "int8", "int4", "fp8", "nvfp4")  # the last one's kernel reads many other formats
TOKENS = 8  # of the prompt; any number compiles the same code


def main() -> None:
    model = load()[0]
    for method in METHODS:
        decode(model, torch.arange(TOKENS, device="cpu")[None], make_cache(model, method), max_new_tokens=3)


if __name__ == "__main__":
    main()
