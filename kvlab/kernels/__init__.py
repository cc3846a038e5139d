"""Kernels: decode attention that reads packed K and V as they are stored, beside a reference in torch.

`attend.py` decides and calls, `cpu.py` is compiled by numba, `gpu.py` is Triton (imported where it is used).
"""

from .attend import attend_packed, fits, reference

__all__ = ["attend_packed", "fits", "reference"]
