"""Clock: which cache the seconds belong to, when several are filled from one prefill.

numba's time to compile a kernel counts for none: a machine pays it once, at the first use.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import torch

try:
    from numba.core import event
except ImportError:  # a workshop's kit leaves numba out, and then nothing is compiled
    COMPILING = None
else:
    COMPILING = event.TimingListener()
    event.register("numba:compile", COMPILING)


def compiled() -> float:
    """Seconds that numba has compiled in this process so far."""
    return COMPILING.duration if COMPILING and COMPILING.done else 0.0


class Clock:
    """own: {cache's name: seconds that were spent for it alone}; `total`: all seconds since the beginning,
    `prepared`: those that compiled kernels. What is left, the shared prefill above all, is `shared`."""

    def __init__(self):
        self.own: Counter[str] = Counter()
        self.started, self.ended = time.perf_counter(), None
        self._whose: str | None = None
        self._since = self.started
        self._compiled = self._before = compiled()

    def turn(self, whose: str | None) -> str | None:
        """From now on the time belongs to this one (None: to none); returns the previous one."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was asked of the device until now
        now, before, spent = time.perf_counter(), self._whose, compiled()
        if before is not None:
            self.own[before] += now - self._since - (spent - self._compiled)
        self._whose, self._since, self._compiled = whose, now, spent
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

    def set(self, own: dict[str, float], shared: float) -> None:
        """So many seconds were spent until now, most of them by an earlier run."""
        self.turn(None)
        self.own = Counter(own)
        self.started = time.perf_counter() - self.prepared - sum(own.values()) - shared

    @property
    def total(self) -> float:
        return (self.ended or time.perf_counter()) - self.started

    @property
    def prepared(self) -> float:
        return self._compiled - self._before

    @property
    def shared(self) -> float:
        """Seconds that belonged to none."""
        return max(0.0, self.total - self.prepared - sum(self.own.values()))
