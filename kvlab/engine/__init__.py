"""Engine: what computes the body of a decode step: the model's own modules, or compiled code.

The cache, every method of it, prompts and padding are the same under either. `compiled.py` puts a compiled
step in the place of a model's forward: of a Llama-shaped model the arithmetic in `block.py`, compiled by
numba, of any other the model's own, compiled by torch (`traced.py`).
"""

from .compiled import compiled, engine_of

__all__ = ["compiled", "engine_of"]
