"""Late: what is wrong is refused one step later on a GPU, so that no step waits for it."""

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
    """Whether somebody will call `refuse` when it is known that one of `bad`, of one token, is true; else it
    has to be found out now."""
    late = getattr(_open, "late", None)
    if late is None or not late.takes(bad) or bad.shape[2] != 1:
        return False
    late.ask(bad, refuse)
    return True


class Late:
    """Questions to a device whose answers are looked at when the next token comes, if they are there by then.

    A prompt is refused at once. A step that is captured into a CUDA graph asks nothing.
    """

    def __init__(self):
        self._asked: deque = deque()  # (event, answer, what refuses), oldest first

    @contextmanager
    def open(self) -> Iterator[None]:
        """Refuse what is known by now, and take what is asked meanwhile. Raises what `refuse` raises."""
        self.tell()
        before, _open.late = getattr(_open, "late", None), self
        try:
            yield
        finally:
            _open.late = before

    def takes(self, bad: Tensor) -> bool:
        """Whether it is asked about these numbers."""
        return far(bad)

    def ask(self, bad: Tensor, refuse: Callable[[], None]) -> None:
        """Call `refuse` later if any of `bad` is true."""
        if capturing():
            return
        answer, event = torch.empty(1, dtype=torch.bool, pin_memory=bad.is_cuda), None
        answer.copy_(bad.any().view(1), non_blocking=True)
        if bad.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._asked.append((event, answer.numpy(), refuse))

    def settle(self, bad: Tensor, refuse: Callable[[], None], at_once: bool) -> None:
        """Call `refuse` if any of `bad` is true: at once, or on a GPU when somebody asks again."""
        if far(bad) and not at_once:
            self.tell()
            self.ask(bad, refuse)
        elif bad.any():
            refuse()

    def tell(self) -> None:
        """Look at the answers that have come."""
        while self._asked and not capturing() and (self._asked[0][0] is None or self._asked[0][0].query()):
            _, answer, refuse = self._asked.popleft()
            if answer[0]:
                self._asked.clear()
                refuse()


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which no question can be answered."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
