"""kvlab: a course and a laboratory about the KV cache of language models."""

import sys

if sys.argv[:1] == ["-m"] and "kvlab" in sys.orig_argv:  # `python -m kvlab`: torch takes seconds to import
    from .harness import beside

    beside("eval", "start").while_imported()

from . import keep, place, store
from .ask import ask
from .bill import bill
from .decode import Stepper, Trace, decode
from .harness import results
from .methods import FIRST_WAVE, METHODS, method
from .models import prepare

__version__ = "0.1.0"
__all__ = [
    "FIRST_WAVE", "METHODS", "KVCache", "Stats", "Stepper", "Trace", "ask", "bill", "decode", "gate", "keep",
    "load", "load_cache", "make_cache", "method", "place", "prepare", "results",
    "store",
]  # fmt: skip


def __getattr__(name: str):
    if name in ("KVCache", "Stats", "load", "load_cache", "make_cache"):
        from . import cache, make  # a cache is transformers' to begin with, which takes half a second

        return getattr(cache if name in ("KVCache", "Stats") else make, name)
    if name == "gate":
        from .gating import gate

        return gate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__version__"])
