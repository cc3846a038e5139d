"""Ready: the fork server of worker processes, and processes that find our packages."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

from .. import PACKAGE
from .digests import ROOT

PRELOAD = [f"{PACKAGE}.core.preload"]


def get_ready() -> None:
    """Start the fork server, unless it runs: it imports what workers need. Ctrl-C, which would break Python's
    own start there with a traceback, is ignored."""
    from multiprocessing import forkserver  # Windows has none

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        with ours_first():
            forkserver.ensure_running()
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ours_first() -> Iterator[None]:
    """Processes that start meanwhile find our packages, whatever the working directory holds."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if ROOT.name not in ("site-packages", "dist-packages"):  # a checkout
        places.insert(0, str(ROOT))
    changed = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(places)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
