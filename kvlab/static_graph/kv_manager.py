"""KV manager: the application's own buffers for an engine that has no cache (QC AI Research, n.d.).

A static graph reads, for every K or V sequence, one contiguous tensor of S - 1 past rows, and writes the new
token's row. The manager owns that memory and hands out addresses:

    manager = KVManager(sequences=2, length=S, head_dim=D)       # policy="double"
    where = manager.place(); run_the_engine(manager.past_addresses(), where); manager.commit()

Tokens are at the end of the window, after the padding. An append moves the window by one row over memory
reserved behind it; when that is used up, the window is copied back to the front.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from ..parameters import check_number, check_one_of, check_whole

POLICIES = ("shift", "double", "compromise", "ring")


def spare_part(policy: str = "double", extra: float | None = None) -> float:
    """Rows reserved behind the window, as a part of S - 1: 0 for shift and ring, 1 for double, `extra` (0.5
    unless given) for compromise. Raises ValueError for other policies and for a bad `extra`."""
    check_one_of("policy", policy, POLICIES)
    if extra is not None and policy != "compromise":
        raise ValueError(f"extra={extra!r}: only policy=compromise takes it")
    if policy == "compromise":
        extra = 0.5 if extra is None else extra
        check_number("extra", extra, lambda x: 0 <= x < math.inf, "a part of S - 1 that is at least 0")
        return float(extra)
    return 1.0 if policy == "double" else 0.0


class KVManager:
    """Buffers of one row of text: one contiguous allocation per K or V sequence, read and written in place.

    sequences: how many K and V sequences; each is one engine input `[1, heads, S - 1, head_dim]`.
    length: S, the most tokens a step attends to, the new one included. heads: 1 for the document's
    single-head form; with more, the heads' windows follow each other in the same allocation, and moving the
    window by one row still drops every head's oldest row (it was the place where the head before writes its
    newest). policy: `shift` (no spare rows: every append copies), `double` (S - 1 spare rows), `compromise`
    (`extra` * (S - 1) spare rows), `ring` (tokens in slot t mod (S - 1), never moved: what a runtime that
    accepts an index would do). dtype: of K and V, float32, float16 or int8.

    Counters: `reserved_bytes` (buffers), `copied_bytes` and `copies` (of whole windows). With one head and a
    place behind the window, the engine writes the new row where it belongs and nothing is copied; otherwise
    it writes to a staging row, which `commit` copies. `n` appends make n // (spare + 1) copies, each of
    S - 1 rows per sequence. Raises ValueError for sizes below 1 (S: 2) and bad policies.
    """

    def __init__(
        self, sequences: int, length: int, head_dim: int, *, heads: int = 1, policy: str = "double",
        extra: float | None = None, dtype=np.float32,
    ):  # fmt: skip
        part = spare_part(policy, extra)
        check_whole("length", length, 2)
        for name, value in {"sequences": sequences, "head_dim": head_dim, "heads": heads}.items():
            check_whole(name, value, 1, name)
        self.arguments = {"heads": heads, "policy": policy, "extra": extra, "dtype": dtype}
        self.length, self.window, self.head_dim, self.heads = length, length - 1, head_dim, heads
        self.ring = policy == "ring"
        self.spare = int(part * self.window + 1e-9)  # whole rows the window can move over
        self.row_bytes = head_dim * np.dtype(dtype).itemsize
        size = round((heads + part) * self.window * head_dim)  # the document counts half a row as well
        self.buffers = np.zeros((sequences, size), dtype)  # a row is one sequence's contiguous allocation
        self._bases = [buffer.ctypes.data for buffer in self.buffers]
        self._staging: np.ndarray | None = None  # `[sequences, heads, 1, head_dim]`, once it is needed
        self._in_place = False
        self.start = 0  # first row of the window
        self.seen = 0  # tokens appended so far
        self.copied_bytes = self.copies = 0
        # Added to a step's scores: 0 where a token is, -inf at padding; the last column is the new token.
        self.mask = np.full(length, -np.inf, np.float32)
        self.mask[-1] = 0

    # Addresses for the engine.

    def past_addresses(self) -> list[int]:
        """Where each sequence's window begins: `[heads, S - 1, head_dim]`, contiguous."""
        offset = self.start * self.row_bytes
        return [base + offset for base in self._bases]

    @property
    def past(self) -> np.ndarray:
        """The windows of all sequences, `[sequences, heads, S - 1, head_dim]`, a view."""
        first, size = self.start * self.head_dim, self.heads * self.window * self.head_dim
        windows = self.buffers[:, first : first + size]
        return windows.reshape(len(windows), self.heads, self.window, self.head_dim)

    def place(self) -> list[int]:
        """Addresses where the engine is to write a new row per head. Follow with `commit` after the run."""
        row, room = self.start + self.window, self.start < self.spare
        if self.ring:
            row, room = self.seen, self.seen < self.window
        self._in_place = self.heads == 1 and room
        if self._in_place:
            return [base + row * self.row_bytes for base in self._bases]
        if self._staging is None:
            self._staging = np.zeros((len(self.buffers), self.heads, 1, self.head_dim), self.buffers.dtype)
        first, step = self._staging.ctypes.data, self._staging.strides[0]
        return [first + index * step for index in range(len(self.buffers))]

    def commit(self) -> None:
        """The engine has written: take the row that `place` spoke of."""
        self._take(1, None if self._in_place else self._staging)

    def append(self, rows: np.ndarray) -> None:
        """Take rows `[sequences, heads, tokens, head_dim]` that were made elsewhere, by one copy."""
        self._take(rows.shape[2], rows[:, :, -self.window :])

    # Moving the window.

    def _take(self, tokens: int, rows: np.ndarray | None) -> None:
        count = min(tokens, self.window)
        slots = slice(self.window - count, None)
        if self.ring:
            slots = np.arange(self.seen + tokens - count, self.seen + tokens) % self.window
        else:
            self._move(count)
        if rows is not None:
            self.past[:, :, slots] = rows
            self.copied_bytes += rows.nbytes
        self.seen += tokens
        self.mask[:-1][self.used] = 0

    def _move(self, count: int) -> None:
        """Move the window by `count` rows: over spare memory, or by copying it back to the front."""
        if self.start + count <= self.spare:
            self.start += count
            return
        size = (self.heads * self.window - count) * self.row_bytes
        offset = (self.start + count) * self.row_bytes
        for base in self._bases:
            ctypes.memmove(base, base + offset, size)
        self.start = 0
        self.copied_bytes += len(self.buffers) * size
        self.copies += 1

    # What is held.

    @property
    def held(self) -> int:
        """Tokens held: those seen, S - 1 at most."""
        return min(self.seen, self.window)

    @property
    def used(self) -> slice:
        """Slots of the window that hold tokens."""
        return slice(0, self.held) if self.ring else slice(self.window - self.held, None)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers: in the single-head form 2 * layers * KV heads * (1 + extra) * (S - 1) * D *
        bits / 8; with `heads` in one allocation (heads + extra) replaces heads * (1 + extra)."""
        return self.buffers.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Everything this manager holds: buffers, the mask, and the staging row."""
        staged = 0 if self._staging is None else self._staging.nbytes
        return self.reserved_bytes + self.mask.nbytes + staged

    def positions(self) -> np.ndarray:
        """Position of the token in every slot of the window `[S - 1]`, -1 for padding."""
        slots, last = np.arange(self.window), self.seen - 1
        found = last - (last - slots) % self.window if self.ring else slots + self.seen - self.window
        return np.where(found >= 0, found, -1)

    def rows(self) -> np.ndarray:
        """The tokens held, oldest first, `[sequences, heads, held, head_dim]`, a copy."""
        slots = np.argsort(self.positions(), kind="stable")[self.window - self.held :]
        return self.past[:, :, slots]

    def copy(self) -> KVManager:
        """A fork: buffers of its own with the same tokens; its counters begin at 0."""
        twin = KVManager(len(self.buffers), self.length, self.head_dim, **self.arguments)
        twin.start, twin.seen = self.start, self.seen
        twin.mask[:] = self.mask
        twin.past[:, :, self.used] = self.past[:, :, self.used]
        return twin

    def check_crop(self) -> None:
        """ValueError if tokens have already left the window."""
        if self.seen > self.window:
            raise ValueError(f"crop: {self.seen - self.window} tokens have left the window of {self.window}")

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens. ValueError as `check_crop` says."""
        self.check_crop()
        kept = self.rows()[:, :, : max(0, self.seen - tokens)]
        self.start = self.seen = 0
        self.mask[:-1] = -np.inf
        if kept.shape[2]:
            self.append(kept)
