"""Cells as runs store them, and the report of some, for tests of what is made of cells."""

import csv
import io

from rich.console import Console

from eval import report
from eval.core.cells import written
from eval.core.machine import machine, versions
from eval.core.results import Store


def cell(method="full", task="recall", outcomes=(1.0, 0.0, 1.0, 0.0), **more) -> dict:
    """Whole, with accuracy `acc` of the outcomes; more replaces any of its fields."""
    value, count = sum(outcomes) / len(outcomes), len(outcomes)
    stderr = (value * (1 - value) / count) ** 0.5
    metric = {"metric": "acc", "value": value, "stderr": stderr, "n": count, "higher_is_better": True}
    return {
        "model": "m", "method": method, "task": task, "config": {"limit": 4}, "metrics": [metric],
        "values": {"acc": list(outcomes)}, "seconds": 1.0, "machine": machine(threads=1),
        "bytes": {"device_bytes": 8.0, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 9},
        "versions": versions(), **more,
    }  # fmt: skip


def store_of(out, cells) -> Store:
    """A folder that holds these cells, whatever they say."""
    store = Store(out)
    store.prepare()
    for place, one in enumerate(cells):
        store.files.write(f"{place}.json", written(one))
    return store


def reported(store: Store, width=200, **how) -> tuple[str, str, list[dict], list]:
    """(what is printed, the page, the rows of accuracy.csv, the paths of its files) of a folder's report."""
    out = io.StringIO()
    paths = report.write(store, console=Console(file=out, width=width), **how)
    file = store.out / "accuracy.csv"
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))) if file.is_file() else []
    return out.getvalue(), (store.out / "report.html").read_text(), rows, paths
