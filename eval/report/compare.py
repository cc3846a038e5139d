"""The harness in one call, for a notebook: score a few methods in this process and look at the result."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ..accuracy.accuracy import Accuracy
from ..accuracy.taskset import AGREEMENT
from ..core.errors import Failed
from ..core.measurement import record
from ..core.progress import Bar
from ..core.results import Store
from . import budgets, plots, tables


def compare(
    methods, tasks=("recall", AGREEMENT), *, limit: int = 16, model: str | None = None, out=None
) -> tables.Board:
    """Score `methods` on lm-eval `tasks`, as `python -m eval accuracy` does, and return the `Board`.

    methods: specs such as "h2o:budget=0.2", also of methods entered with `kvlab.method` in this process.
    tasks: local names, lm-eval's own, or "agreement". limit: documents per task. model: a folder or hub id
    (default: the workshop model). out: a folder to keep the cells in (default: none is kept).
    Raises ValueError when a method or task is unknown or a cell cannot be made.
    """
    with tempfile.TemporaryDirectory() as temporary:
        wanted = Accuracy(
            methods=tuple(methods),
            tasks=tuple(tasks),
            limit=limit,
            model=model,
            out=Path(out or temporary),
            jobs=0,
        )
        wanted.check()
        store, cells = Store(wanted.folder), wanted.cells()
        store.prepare()
        missing = store.missing(cells)
        with contextlib.redirect_stderr(io.StringIO()):  # the bars of libraries
            for cell, found in wanted.made(missing, Bar("", 0, 0.0)) if missing else ():
                if isinstance(found, Failed):
                    raise ValueError(f"{wanted.label(cell)}: {found}")
                store.save(record(cell, found, wanted.threads))
        return tables.boards([store.load(cell) for cell in cells])[0]


def print_board(board: tables.Board) -> None:
    """The protocol, accuracy per task, agreement with the full cache, bytes as shares of what that holds."""
    if board.protocol:
        print(board.protocol)
    head = [f"{task[:10]:>11}" for task in (*board.tasks, "agreement")]
    wide = max(26, *(len(method) + 2 for method in board.methods))
    print(f"{'method':{wide}}{''.join(head)}{'device':>9}{'moved':>8}")
    for method in board.methods:
        scores = [board.entries[method, task].text for task in board.tasks]
        agree = board.agreement.get(method, {}).get("top1")
        scores.append(tables.shown(agree) if agree else "–")
        share = board.bytes.get(method, {})
        sizes = [f"{share[name]:.1%}" if name in share else "–" for name in ("device_bytes", "moved_bytes")]
        print(f"{method:{wide}}{''.join(f'{score:>11}' for score in scores)}{sizes[0]:>9}{sizes[1]:>8}")


def pareto(board: tables.Board) -> Figure:
    """Mean accuracy against the bytes held on the device: up and to the left is better."""
    with matplotlib.rc_context(plots.SETTINGS):
        return plots.against_bytes(board.points, "bytes held on the device")


def front(board: tables.Board) -> list[str]:
    """Methods that no other beats: at least as accurate with at most as many bytes on the device."""
    known = {point["method"]: (point["x"], point["accuracy"]) for point in board.points}
    best = budgets.front(list(known.values()))
    return [method for method, point in known.items() if point in best]
