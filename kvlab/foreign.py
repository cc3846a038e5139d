"""Foreign: attention code that is not kvlab's is told so when it takes a cache's layer for a tensor."""

from __future__ import annotations

from torch import Tensor

FOREIGN = (
    "a part of the model that attends is compiled, computes attention by itself, or came in after the cache "
    "was made: a kvlab cache is for the model inside torch.compile(model), model._orig_mod, with the layers "
    "that it had at make_cache"
)


class NoTensor:
    """What stands in the place of K, V or a mask: whatever only a tensor can do is refused in one line."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError(FOREIGN)

    def __getattr__(self, name: str):
        if hasattr(Tensor, name) and not hasattr(type(self), name):
            raise AttributeError(FOREIGN)
        return object.__getattribute__(self, name)  # raises what a property did, or Python's own error

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_):
        raise ValueError(FOREIGN)

    __getitem__ = __setitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __invert__ = __len__ = _refuse
