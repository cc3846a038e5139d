"""Spec: a method with its parameters, parsed from a user's text, `h2o:budget=0.2`.

Parsing does not import transformers, so a wrong name is refused at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import nearest
from .finding import Method, find
from .parameters import check_kind


@dataclass(frozen=True)
class Spec:
    """A method with its parameters, parsed once from its text."""

    text: str  # as written: the name of its results
    method: Method
    parameters: dict[str, object]

    @property
    def name(self) -> str:
        """The method's name, without parameters."""
        return self.method.name

    def policies(self) -> dict:
        """The policies that it is made of, before there is a model: without its link, which is one of a
        machine's then."""
        told = {name: value for name, value in self.parameters.items() if name != "link"}
        return self.method.policies(**told)

    def __str__(self) -> str:
        return self.text


def parse(spec: str | Spec, method: Method | None = None) -> Spec:
    """`"h2o:budget=0.2,recent=0.5"` -> its `Spec`; a Spec is returned unchanged.

    The name is one of the table's, or `module.Class` of a Keep, Store, format, Place or Fetch of your own;
    method: what it stands for, if it is neither.
    Raises ValueError, naming the nearest known names, for anything unknown or malformed.
    """
    if isinstance(spec, Spec):
        return spec
    check_kind("method", spec, str, "a text such as 'h2o:budget=0.2'")
    name, _, rest = spec.strip().partition(":")
    method, parameters = method or find(name), {}
    known = method.parameters
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ValueError(f"method {spec!r}: expected parameter=value, got {item!r}")
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(
                f"method {name!r} has no parameter {key!r}{nearest(key, known)}; it has: {allowed}"
            )
        if key in parameters:
            raise ValueError(f"method {spec!r}: {key} is given twice")
        parameters[key] = _value(value)
        if not _representable(parameters[key], value):
            raise ValueError(f"method {spec[:60]!r}: {key}={value[:20]} is no number that can be used")
    return Spec(spec.strip(), method, parameters)


def name_of(text: str) -> str:
    """The method's name in a spec's text, even of an unknown method."""
    return text.strip().partition(":")[0]


def _representable(value, text: str) -> bool:
    """Whether a number is the one written, not NaN and not beyond a float's range. Infinity is written
    `inf`."""
    if isinstance(value, float):
        return math.isfinite(value) or (math.isinf(value) and "inf" in text.lower())
    return not isinstance(value, int) or abs(value) < 2**63


def _value(text: str):
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
