"""The study `static-graph` for the eye: measured.json, and a table for each experiment."""

from __future__ import annotations

from ..core.files import write_json
from ..core.show import Verbatim
from .table import printed

ENGINES = {  # columns of the study static-graph: {title: what is shown of a row}
    "ms/token": lambda r: f"{r['ms']:.2f}",
    "times generate": lambda r: f"{r['ratio']:.2f}",
    "same 200 tokens": lambda r: "yes" if r["equal"] else "no",
    "managing": lambda r: f"{r['manage']:.1%}" if "manage" in r else "",
}
COLUMNS = {
    "engines-512": ENGINES,
    "managing": {
        "step, ms": lambda r: f"{r['step_ms']:.1f}",
        "managing, ms": lambda r: f"{r['manage_ms']:.3f}",
        "share": lambda r: f"{r['share']:.2%}",
        "copied per step": lambda r: f"{r['copied_bytes']:,} B",
        "reserved": lambda r: f"{r['reserved_bytes'] / 1e6:.1f} MB",
    },
    "prompt": {"ms": lambda r: f"{r:.0f}"},
    "memory": {
        "formula": lambda r: f"{r['predicted'] / 1e6:.1f} MB",
        "process grew by": lambda r: f"{r['grown'] / 1e6:.1f} MB",
        "ratio": lambda r: f"{r['grown'] / r['predicted']:.3f}",
    },
    "drift": {
        f"step {step:,}": lambda r, step=step: f"{r[str(step)]:.2%}" for step in (1, 10, 100, 300, 700, 1500)
    },
    "requests": {
        "reserved": lambda r: f"{r['reserved'] / 1e6:.1f} MB",
        "beyond one place per token": lambda r: f"{1 - r['used'] / r['reserved']:.1%}",
    },
    "engines-2048": ENGINES,
}


def report(measurement, store, show, wanted: list) -> None:
    """Write OUT/measured.json, {experiment: {threads, rows}}, and print a table for each experiment."""
    cells = measurement.found(store, show.line)
    measured = {
        name: {"threads": cell["machine"]["threads"], "rows": cell["rows"]} for name, cell in cells.items()
    }
    write_json(store.out / "measured.json", measured)
    for name, found in measured.items():
        columns = COLUMNS[name]
        body = [[label, *(text(row) for text in columns.values())] for label, row in found["rows"].items()]
        print(f"\n{name}, {found['threads']} thread")
        printed(["", *columns], body, Verbatim())
