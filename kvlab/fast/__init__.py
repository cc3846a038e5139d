"""Fast: all that is compiled: decode attention that reads K and V as they are stored, and whole steps.

`step.py` takes a layer's decode step by one call of a kernel (`fused.py`), `attend.py` decides and calls one
for attention alone; `cpu.py`, `wide.py` and `turning.py` are compiled by numba (their innermost loops stand
in `lanes.py`), `gpu.py` and `gpu_kivi.py` are Triton (imported where they are used). `compiled.py` puts a
compiled step in the place of a Llama-shaped model's forward (`block.py`). `graph.py` replays steps on a GPU.
What this has to know of keeps, stores and formats stands in `known.py`, by their class.
"""

from .attend import attend_packed, fits, reference
from .fused import Fused
from .step import made, step

__all__ = ["Fused", "attend_packed", "fits", "made", "reference", "step"]
