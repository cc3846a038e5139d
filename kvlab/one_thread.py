"""One thread: a cache serves one thread at a time, in a pass and outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import enumerate as enumerate_threads
from threading import get_ident

from .modes import keeping

ANOTHER = "another thread is in a pass through this cache: wait for it, or make a cache for each thread"


class OneThread:
    """Admits one thread; a copy admits any."""

    def __init__(self):
        self._inside: dict[str, int] = {}  # the thread that is in a pass; setdefault is one step

    def __deepcopy__(self, memo) -> OneThread:
        return OneThread()

    def enter(self) -> None:
        """This thread comes in. RuntimeError while another one is in, or left in the middle of a pass."""
        me = get_ident()
        if self._inside.setdefault("thread", me) != me:
            if any(one.ident == self._inside.get("thread") for one in enumerate_threads()):
                raise RuntimeError(ANOTHER)
            self._inside["thread"] = me  # that thread has ended

    def leave(self) -> None:
        """If this thread is in, others may enter."""
        if self._inside.get("thread") == get_ident():
            self._inside.clear()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """`keeping`, and RuntimeError while another thread is in here, or in a pass."""
        outside = not self._inside
        self.enter()
        try:
            with keeping():
                yield
        finally:
            if outside:
                self._inside.clear()
