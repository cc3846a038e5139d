"""Fast: all that is compiled: decode attention that reads K and V as they are stored, and whole steps.

`step.py` does a layer's decode step in one call of a kernel (`fused.py`), `attend.py` decides and calls one
for attention alone; `cpu.py`, `wide.py` and `turning.py` are compiled by numba (their innermost loops are in
`lanes.py`), `gpu.py` and `gpu_kivi.py` are Triton (imported where they are used). `compiled.py` replaces a
Llama-shaped model's forward by a compiled step (`block.py`). `graph.py` replays steps on a GPU. `known.py`
has the facts about keeps, stores and formats, by their class.
"""

from .attend import attend_packed, fits, reference
from .fused import Fused
from .step import made, step

__all__ = ["Fused", "attend_packed", "fits", "made", "reference", "step"]
