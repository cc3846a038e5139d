"""Finding: what a named method is, how it enters the table, and how a name is found in it."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from .keep import Keep
from .place import Device, Fetch, Host
from .store import Exact, Growing

OWN = "of your own"


@dataclass(frozen=True)
class Method:
    """A named method: `policies(**parameters)` returns the keep, store and place of a `KVCache`."""

    name: str
    summary: str
    policies: Callable[..., dict]
    family: str = OWN
    paper: str = ""  # authors and year, as in docs/sources.md; empty where nobody in particular

    @property
    def parameters(self) -> dict[str, object]:
        """Parameter names and their defaults."""
        signature = inspect.signature(self.policies).parameters.values()
        return {parameter.name: parameter.default for parameter in signature}


METHODS: dict[str, Method] = {}  # those that any model can be given as they are
PROFILED: dict[str, Method] = {}  # those that want a file about the model first: `profile=`


def method(name: str, family: str = OWN, paper: str = ""):
    """Decorator: enter a function `(**parameters) -> {"keep": ..., "store": ..., "place": ...}` into the
    table under `name`. Its docstring is the one-sentence summary."""

    def enter(policies):
        entry = Method(name, " ".join((policies.__doc__ or "").split()), policies, family, paper)
        table = PROFILED if "profile" in entry.parameters else METHODS
        table[name] = entry
        return policies

    return enter


def find(name: str) -> Method:
    """The method of a name in the table, or of `module.Class`.

    Raises ValueError, naming the nearest known names.
    """
    known = METHODS | PROFILED
    if name in known:
        return known[name]
    if "." in name:
        return _import(name)
    raise ValueError(f"unknown method {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def _import(path: str) -> Method:
    """`module.Class` as a method of its own."""
    module, _, attribute = path.rpartition(".")
    try:
        policy = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method {path!r}: {error}") from error
    kinds = (
        (Keep, "keep"),
        (Fetch, "fetch"),
        (Device, "place"),
        (Growing, "store"),
        (Exact, "store"),
    )
    role = next((role for kind, role in kinds if inspect.isclass(policy) and issubclass(policy, kind)), None)
    if role is None:
        raise ValueError(f"method {path!r}: expected a Keep, Store, format, Place or Fetch class")

    def policies(**parameters):
        made = policy(**parameters)
        return {"place": Host(made)} if role == "fetch" else {role: made}

    policies.__signature__ = inspect.signature(policy)
    summary = (inspect.getdoc(policy) or "").split("\n")[0]
    return Method(path, summary, policies)


def nearest(name: str, known) -> str:
    """The known names that are most like one that is not, as the end of a sentence."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f", did you mean {' or '.join(near)}?" if near else ""
