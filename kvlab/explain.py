"""Explain: one method and each of its parameters, in the words of its classes."""

from __future__ import annotations

import inspect
import re

from . import keep
from .finding import Method, find
from .spec import parse

LEFT_OUT = re.compile(
    " (?:Raises |State: |Parts: |Deviations?: |The default cost |Cost(?: of the codes)?: )"
)  # after these, no parameters
ELSEWHERE = re.compile("(?:see|as in) `")  # a meaning that another class has
POINTER = re.compile(r" \(see `(Keep|TopK)`(?:; 1: everything)?\)|, as in `(TopK)`")
SHARES = {  # a budget in the words of the class that a pointer names
    "Keep": "A fraction is of the prompt, a whole number counts tokens, 1 keeps all.",
    "TopK": "A fraction is of the tokens seen so far, a whole number counts tokens, 1 fetches all.",
}
OTHERS = {  # parameters that no class of the method explains under their name
    "chunk": "tokens that stay or go together, by the mean of their scores (ChunkKV, Liu et al. 2025).",
    "smooth": "0 to 1: divide every channel of K by its own size to that power before it is quantized.",
    "rotate": "true, signs: turn every vector by a Hadamard matrix before it is rounded; signs: random ones.",
    "skip_layers": "layers that stay exact, from the first or from the last back, as in 0+1+-2+-1.",
    "group": "neighbouring channels that share a scale.",
    "scale": 'dtype of the scales, "fp16" or "fp32".',
    "nonfinite": '"refuse" NaN, infinity and values too large for the format, or "clip" them to its largest.',
    "extra": "spare rows of the policy `compromise`, as a share of length - 1.",
    "k": "the format of keys.",
    "v": "the format of values.",
    "pool": "the room on the host: a fraction of the prompt's tokens, or a count.",
    "victim": "which token leaves the host when that is full (docs/offloading.md).",
}


def explain(text: str) -> str:
    """A method's summary, its paper, and each parameter with its default and meaning. ValueError for an
    unknown method."""
    method = find(parse(text).name)
    lines = [f"{method.name}: {method.summary}", *([f"{method.paper}."] if method.paper else [])]
    told = meanings(method)
    for name, default in method.parameters.items():
        lines += ["", f"{name}={default}", *([f"    {told[name]}"] if name in told else [])]
    return "\n".join(lines)


def meanings(method: Method) -> dict[str, str]:
    """{parameter: its meaning in its class, or in a base of it}."""
    found: dict[str, str] = {}
    if not method.parameters:
        return found
    for kind in kinds(method):
        names = "|".join({**method.parameters, **getattr(kind, "__dataclass_fields__", {})})
        begins = re.compile(rf"(?:^|(?<=[.)] ))((?:{names})(?:, \w+)*)(?: \([^)]*\))?: ")
        for part in re.split(r"\n\s*\n", inspect.getdoc(kind) or ""):
            part = " ".join(part.split())
            starts = [*begins.finditer(part)]
            for start, end in zip(starts, [*(one.start() for one in starts[1:]), len(part)]):
                meaning = LEFT_OUT.split(part[start.end() : end])[0].strip()
                for name in start[1].split(", ") if not ELSEWHERE.match(meaning) else ():
                    found.setdefault(name, meaning)
    for name, meaning in found.items():
        pointer = POINTER.search(meaning)
        found[name] = POINTER.sub("", meaning)
        if pointer and name == "budget":
            found[name] += f" {SHARES[pointer[1] or pointer[2]]}"
    return {name: OTHERS[name] for name in method.parameters if name in OTHERS} | found


def kinds(method: Method) -> list[type]:
    """The classes in a method's policies that are kvlab's or made from them, and their bases."""
    ours = lambda kind: any(one.__module__.startswith("kvlab") for one in kind.__mro__)
    entered = [kind for kind in vars(keep).values() if isinstance(kind, type)]
    own = [k for k in entered if any(e.name == method.name for e in vars(k).get("entries", ()))]
    if method.name == "padded":  # no policies, but an engine
        from .static_graph import KVManager, StaticGraphEngine

        return [KVManager, StaticGraphEngine]
    todo, seen = [], {}
    if "profile" not in method.parameters:  # which needs a file
        todo += method.policies().values()
    while todo:
        one = todo.pop(0)
        if ours(type(one)) and id(one) not in seen:
            seen[id(one)] = one
            todo += getattr(one, "__dict__", {}).values()
    first = [*own, *map(type, seen.values())]  # a class's own words come before its base's
    found = dict.fromkeys([*first, *(kind for one in first for kind in one.__mro__)])
    return [kind for kind in found if ours(kind)]
