"""Finding: the class of a named method, how it enters the table, and how a name is found there."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .errors import first_line, nearest
from .keep import Keep
from .named import COMMON, OWN, Entry
from .place import Device, Fetch, Host
from .store import Exact, Growing


@dataclass(frozen=True)
class Method(Entry):
    """A named method: `policies(**parameters)` returns the keep, store and place of a `KVCache`."""

    policies: Callable[..., dict] = dict

    @property
    def parameters(self) -> dict[str, object]:
        """Parameter names and their defaults."""
        signature = inspect.signature(self.policies).parameters.values()
        return {parameter.name: parameter.default for parameter in signature}

    def spec(self, parameters: str) -> str:
        """The text of this method with these parameters, such as `less`."""
        return f"{self.name}:{parameters}" if parameters else self.name


ROLES = {Keep: "keep", Fetch: "fetch", Device: "place", Growing: "store", Exact: "store"}
METHODS: dict[str, Method] = {}  # those that any model can use directly
PROFILED: dict[str, Method] = {}  # those that first need a file about the model: `profile=`


def method(name: str, family: str = OWN, paper: str = "", **others):
    """Decorator: enter a function `(**parameters) -> {"keep": ..., "store": ..., "place": ...}` into the
    table under `name`. Its docstring is the one-sentence summary; others: see `Entry`."""

    def enter(policies):
        summary = " ".join((policies.__doc__ or "").split())
        _enter(Method(name, summary, family, paper, policies=policies, **others))
        return policies

    return enter


def enter(kind: type[Keep]) -> None:
    """Enter a keep under its own names (`named`)."""
    for one in vars(kind).get("entries", ()):
        _enter(Method(**vars(one), policies=_alone(kind, one)))


def _enter(made: Method) -> None:
    table = PROFILED if "profile" in made.parameters else METHODS
    table[made.name] = made


def _alone(kind: type[Keep], one: Entry):
    """The function that makes a keep from a method's parameters: the class's own, then those of `takes`."""
    own, besides = [], []
    for parameter in _named(kind):
        name = parameter.name.removesuffix("_length")
        if name in COMMON and parameter.name not in inspect.get_annotations(kind):
            besides += [parameter.replace(name=name)] if name in one.takes else []
        elif parameter.name not in one.given:
            default = None if parameter.default is parameter.empty else parameter.default
            own.append(parameter.replace(default=default))
    shown = [one.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in (*own, *besides)]

    def policies(**parameters):
        if "chunk" in parameters and "chunk" not in (parameter.name for parameter in own):
            parameters["chunk_length"] = parameters.pop("chunk")
        return {"keep": kind(**one.given, **parameters)}

    policies.__signature__ = inspect.Signature(shown)
    return policies


def _named(kind) -> list[inspect.Parameter]:
    """The parameters of a class that have names: not `*args` and `**more`."""
    given = inspect.signature(kind).parameters.values()
    return [one for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


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


def imported(path: str):
    """What `module.Class` names. ValueError, one line, for a module that cannot be imported or lacks it."""
    module, _, attribute = path.rpartition(".")
    if not all(path.split(".")):
        raise ValueError(f"method {path!r}: expected a name, or module.Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ValueError(f"method {path!r}: {_said(error)}") from None


def _import(path: str) -> Method:
    """`module.Class` as a method of its own."""
    policy = imported(path)
    role = role_of(policy)
    if role is None or not inspect.isclass(policy):
        raise ValueError(f"method {path!r}: expected a Keep, Store, format, Place or Fetch class")

    summary = (inspect.getdoc(policy) or "").split("\n")[0]
    if role == "keep":
        return Method(path, summary, policies=_alone(policy, Entry(path, summary)))

    def policies(**parameters):
        return put(role, policy(**parameters))

    policies.__signature__ = inspect.Signature(_named(policy))
    return Method(path, summary, policies=policies)


def role_of(policy) -> str | None:
    """The role of a policy, or of its class, in a cache: keep, store, place, or a host's fetch."""
    own = policy if inspect.isclass(policy) else type(policy)
    return next((role for kind, role in ROLES.items() if issubclass(own, kind)), None)


def put(role: str, policy) -> dict:
    """A policy in this role, in `KVCache`'s form."""
    return {"place": Host(policy)} if role == "fetch" else {role: policy}


def _said(error: BaseException) -> str:
    """The error of an import, in one line, and the line of the user's module that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [one for one in frames if "importlib" not in one.filename and one.filename != __file__]
    said = first_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    if not frames:
        return said
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {type(error).__name__}: {said}"
