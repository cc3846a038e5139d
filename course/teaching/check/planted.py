"""Planted: the right answer to each exercise and the mistakes in it, as text (course/exercises/chNN.txt).

functions that answers call

# choose(queries, keys, guess, part, alpha, cap)
the right answer

- a part of it => what is there instead; several such lines are one mistake
> the sentence that is said of it
-
an answer of its own, which may call `right`
> the sentence
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable

import torch

RIGHT: dict[str, Callable] = {}  # exercise -> the right function
MISTAKES: dict[
    str, list[tuple[str, Callable]]
] = {}  # exercise -> (sentence, a function that makes this mistake)


def read(text: str) -> None:
    """Make the functions of one file. ValueError for a part that a right answer has not, or has twice."""
    helpers, *exercises = re.split(r"^# ", text, flags=re.M)
    scope = {"math": math, "torch": torch}
    exec(helpers, scope)
    for one in exercises:
        head, _, rest = one.partition("\n")
        body, _, rest = rest.partition("\n\n")
        name = head.partition("(")[0]
        RIGHT[name] = _made(head, body, scope)
        MISTAKES[name] = [
            (sentence, _made(head, _changed(name, body, wrong), scope | {"right": RIGHT[name]}))
            for wrong, sentence in re.findall(r"((?:^[^>\n].*\n)+)> (.+)", rest, flags=re.M)
        ]


def _made(head: str, body: str, scope: dict) -> Callable:
    found = dict(scope)
    exec(f"def {head}:\n{textwrap.indent(body, '    ')}", found)
    return found[head.partition("(")[0]]


def _changed(name: str, body: str, wrong: str) -> str:
    """The right body with these mistakes, or the body that stands there itself."""
    if wrong.startswith("-\n"):
        return wrong[2:]
    for line in wrong.splitlines():
        part, _, instead = line.removeprefix("- ").replace("\\n", "\n").partition(" =>")
        if body.count(part) != 1:
            raise ValueError(f"{name}: {part!r} stands {body.count(part)} times in the right answer")
        body = body.replace(part, instead.removeprefix(" "))
    return body
