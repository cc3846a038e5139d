"""Kernels: decode attention that reads K and V as they are stored, beside a reference in torch.

`attend.py` decides and calls, `fused.py` does it for a whole step, `cpu.py`, `wide.py` and `turning.py` are
compiled by numba (their innermost loops stand in `lanes.py`), `gpu.py` and `gpu_kivi.py` are Triton (imported
where they are used).
"""

from .attend import attend_packed, fits, reference
from .fused import Fused

__all__ = ["Fused", "attend_packed", "fits", "reference"]
