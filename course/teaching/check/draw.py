"""Numbers that the cases of a check are drawn from."""

from __future__ import annotations

import torch


def whole(draw: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both of them possible."""
    return int(torch.randint(low, high + 1, (), generator=draw))


def shuffled(draw: torch.Generator, things: list) -> list:
    """The same things in another order."""
    return [things[place] for place in torch.randperm(len(things), generator=draw).tolist()]
