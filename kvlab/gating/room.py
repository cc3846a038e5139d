"""Room: a method's bytes for these users' contexts, and whether they fit, by the bill's own rules."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..bill.account import account, policies, weights
from ..bill.describe import describe
from ..parameters import check_whole, count_of, shown
from ..spec import Spec

TOKENS = 32_768  # of a context, if neither the user nor the model states one
LEAST = 2**20  # bytes: less is a number whose unit was forgotten
UNITS = {
    "": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Room:
    """The requirements: memory in bytes (None: not given), tokens of every user's context, users."""

    model: dict
    memory: float | None
    context: int
    users: int

    @classmethod
    def of(cls, config, memory=None, context=None, users: int = 1) -> Room:
        """memory: bytes, or text such as "24GB"; context: tokens, or text such as "32k" (default: the model's
        trained length, up to `TOKENS`). ValueError, one line, for invalid text, and for a context that the
        model was not trained for."""
        memory, tokens = asked(memory, context, users)
        model = describe(config)
        most = model["context"]
        if tokens is None:
            tokens = min(most or TOKENS, TOKENS)
        if most is not None and tokens > most:
            raise ValueError(f"context={context}: the model was trained for {most:,} tokens")
        return cls(model, memory, tokens, users)

    def bytes(self, spec: Spec) -> float:
        """Of these users' caches, with 16-bit numbers, on the device and on the host. ValueError where kvlab
        refuses the method on such layers."""
        row = account(spec, policies(spec), self.model, self.context)
        return self.users * (row.device + row.host)

    def fits(self, size: float) -> bool | None:
        """Whether caches of this size fit beside 16-bit weights; None if no memory was given."""
        return None if self.memory is None else weights(self.model) + size <= self.memory


def asked(memory, context, users: int) -> tuple[float | None, int | None]:
    """(bytes, tokens) of what `Room.of` takes; ValueError for what no model allows."""
    check_whole("users", users, 1, "users")
    return None if memory is None else _sized(memory), None if context is None else count_of(context)


def _sized(memory) -> float:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(memory))
    unit = UNITS.get(found[2].upper()) if found else None
    try:
        size = float(found[1]) * unit
    except (TypeError, ValueError):
        size = 0.0
    if not LEAST < size < float("inf"):
        raise ValueError(f"memory={shown(memory)}: expected a size such as 24GB or 16GiB")
    return size
