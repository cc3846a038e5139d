"""Clock: whose seconds they are, where several caches are filled from one prefill."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import torch


class Clock:
    """own: {cache's name: seconds that were spent for it alone}; `total`: all seconds since the beginning.
    What is nobody's own, the shared prefill above all, is `shared`."""

    def __init__(self):
        self.own: Counter[str] = Counter()
        self.started, self.ended = time.perf_counter(), None
        self._whose: str | None = None
        self._since = self.started

    def turn(self, whose: str | None) -> str | None:
        """From now on it is this one's time (None: nobody's); returns whose it was."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was asked of the device until now
        now, before = time.perf_counter(), self._whose
        if before is not None:
            self.own[before] += now - self._since
        self._whose, self._since = whose, now
        return before

    @contextlib.contextmanager
    def of(self, whose: str | None) -> Iterator[None]:
        """Meanwhile it is this one's time."""
        before = self.turn(whose)
        try:
            yield
        finally:
            self.turn(before)

    def stop(self) -> None:
        """The work is done."""
        self.turn(None)
        self.ended = time.perf_counter()

    @property
    def total(self) -> float:
        return (self.ended or time.perf_counter()) - self.started

    @property
    def shared(self) -> float:
        """Seconds that were nobody's own."""
        return max(0.0, self.total - sum(self.own.values()))
