"""Parameters: what a policy may be given, or one line that says what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable


def check_one_of(name: str, value, allowed) -> None:
    """ValueError for a parameter that is none of these."""
    if value not in tuple(allowed):
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, allowed))}")


def check_whole(name: str, value, least: int, unit: str = "tokens") -> None:
    """ValueError for a parameter that is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least} {unit}")


def check_odd(name: str, value) -> None:
    """ValueError for a parameter that is no odd number of tokens."""
    check_whole(name, value, 1)
    if value % 2 == 0:
        raise ValueError(f"{name}={value}: expected an odd number of tokens")


def check_number(name: str, value, within: Callable[[float], bool], expected: str) -> None:
    """ValueError for a parameter that is no number, or not within what is expected."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not within(value):
        raise ValueError(f"{name}={value!r}: expected {expected}")


def check_fraction_or_count(name: str, value) -> float | int:
    """A budget: a fraction in (0, 1] or a count of tokens >= 2 (1 is the fraction: everything)."""
    check_number(
        name, value, lambda x: 0 < x <= 1 or (1 < x < math.inf and x == int(x)),
        "a fraction of tokens in (0, 1] or a whole number of tokens",
    )  # fmt: skip
    return float(value) if value <= 1 else int(value)


def resolve_budget(budget: float | int, tokens: int) -> int | None:
    """Tokens that a budget allows out of `tokens`; None for a budget of 1 (no limit)."""
    if budget == 1:
        return None
    if isinstance(budget, int):
        return budget
    return max(1, int(budget * tokens + 1e-6))
