"""Late: on a GPU, bad numbers are refused one step later, so that no step waits for the check."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_open = threading.local()  # .late: the one that takes refusals now


def far(x: Tensor) -> bool:
    """Whether the host would have to wait for an answer about these numbers."""
    return x.is_cuda


def later(bad: Tensor, refuse: Callable[[], None]) -> bool:
    """Whether `refuse` will be called later if one of `bad`, of one token, is true; if not, the caller must
    check now."""
    late = getattr(_open, "late", None)
    if late is None or not late.takes(bad) or bad.shape[2] != 1:
        return False
    late.ask(bad, refuse)
    return True


class Late:
    """Checks on a device whose results are read when the next token comes, if they are ready by then.

    A prompt is refused at once. A step captured into a CUDA graph checks nothing.
    """

    def __init__(self):
        self._asked: deque = deque()  # (event, answer, what refuses), oldest first

    @contextmanager
    def open(self) -> Iterator[None]:
        """Raise the refusals known by now, and collect the checks made inside this block."""
        self.tell()
        before, _open.late = getattr(_open, "late", None), self
        try:
            yield
        finally:
            _open.late = before

    def takes(self, bad: Tensor) -> bool:
        """Whether checks of these numbers go here."""
        return far(bad)

    def ask(self, bad: Tensor, refuse: Callable[[], None]) -> None:
        """Call `refuse` later if any of `bad` is true."""
        if capturing():
            return
        answer, event = torch.empty(1, dtype=torch.bool, pin_memory=bad.is_cuda, device="cpu"), None
        answer.copy_(bad.any().view(1), non_blocking=True)
        if bad.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._asked.append((event, answer.numpy(), refuse))

    def settle(self, bad: Tensor, refuse: Callable[[], None], at_once: bool) -> None:
        """Call `refuse` if any of `bad` is true: at once, or on a GPU at the next check."""
        if far(bad) and not at_once:
            self.tell()
            self.ask(bad, refuse)
        elif bad.any():
            refuse()

    def tell(self) -> None:
        """Read the results that are ready."""
        while self._asked and not capturing() and (self._asked[0][0] is None or self._asked[0][0].query()):
            _, answer, refuse = self._asked.popleft()
            if answer[0]:
                self._asked.clear()
                refuse()


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be checked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
