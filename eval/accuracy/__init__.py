"""Accuracy: scoring *through* the cache with lm-eval, and agreement with the full cache.

`eval.accuracy:KVLabLM` is the class that lm-eval calls. It is imported when it is asked for, since it brings
torch and lm-eval along.
"""


def __getattr__(name: str):
    if name == "KVLabLM":
        from .lm import KVLabLM

        return KVLabLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
