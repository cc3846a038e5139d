"""Fast: all that is compiled: decode attention that reads K and V as they are stored, and whole steps.

`attend.py` decides and calls a kernel, `fused.py` does it for a whole step of a layer; `cpu.py`, `wide.py`
and `turning.py` are compiled by numba (their innermost loops stand in `lanes.py`), `gpu.py` and `gpu_kivi.py`
are Triton (imported where they are used). `compiled.py` puts a compiled step in the place of a model's
forward: of a Llama-shaped model the arithmetic in `block.py`, of any other the model's own, compiled by torch
(`traced.py`). The cache, every method of it, prompts and padding are the same with and without.
"""

from .attend import attend_packed, fits, reference
from .fused import Fused

__all__ = ["Fused", "attend_packed", "fits", "reference"]
