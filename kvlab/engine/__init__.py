"""Engine: what computes the body of a decode step: the model's own modules, or compiled code.

The cache, every method of it, prompts and padding are the same under either. `block.py` is the arithmetic,
compiled by numba; `compiled.py` puts it in the place of a model's forward.
"""

from .compiled import compiled, engine_of

__all__ = ["compiled", "engine_of"]
