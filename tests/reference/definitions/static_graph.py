"""Static graph: a graph of fixed shapes attends to S tokens: S - 1 rows of a buffer, and the new one."""

from __future__ import annotations

from torch import Tensor


def window(appended: int, length: int) -> list[int]:
    """Position held in every row of the S - 1 after so many appends: the newest last, -1 for padding."""
    rows = [-1] * (length - 1)
    for position in range(appended):
        rows = [*rows[1:], position]
    return rows


def ring(appended: int, length: int) -> list[int]:
    """The same where token t is written into row t mod (S - 1), and nothing ever moves."""
    rows = [-1] * (length - 1)
    for position in range(appended):
        rows[position % (length - 1)] = position
    return rows


def requantized(rows: Tensor, window: int) -> list[float]:
    """The error after every step where int8 buffers take a new scale at each step and are rounded again.

    rows `[heads, tokens, head_dim]` arrive one by one; window: most rows held. Root mean square of what is
    held less what came, over that of what came.
    """
    errors, held = [], [[] for _ in rows]
    for step in range(rows.shape[1]):
        wrong = size = 0.0
        for head, stored in enumerate(held):
            stored.append(rows[head, step].tolist())
            del stored[:-window]
            scale = max(abs(x) for row in stored for x in row) / 127
            stored[:] = [[round(x / scale) * scale for x in row] for row in stored]
            exact = rows[head, max(0, step + 1 - window) : step + 1].tolist()
            for ours, theirs in zip(stored, exact, strict=True):
                wrong += sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
                size += sum(b * b for b in theirs)
        errors.append((wrong / size) ** 0.5)
    return errors
