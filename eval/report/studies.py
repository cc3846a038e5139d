"""The measurement `offload` for readers: a file of rows, tables and timelines."""

from __future__ import annotations

from pathlib import Path

import pandas

from kvlab import plots
from kvlab.measure.timeline import Span, Timeline
from kvlab.spec import name_of

from ..core.files import write_json
from .plots import save


def report(measurement, store, show, wanted: list) -> None:
    """Write and print what every experiment found."""
    write(measurement.found(store), store.out)


def write(cells: dict[str, dict], out: Path) -> None:
    """Write OUT/offload.json, the rows of all experiments, and OUT/offload-machine.json; print the rows.
    Timelines of the modelled link are drawn, and are files for Perfetto besides."""
    write_json(out / "offload.json", [row for cell in cells.values() for row in cell["rows"]])
    for experiment, cell in cells.items():
        write_json(out / "offload-machine.json", cell["machine"])
        rows = pandas.DataFrame(cell["rows"]).drop(columns="experiment")
        print(f"\n{experiment}:\n{rows.to_string(index=False, na_rep='–', float_format='{:.5g}'.format)}")
        for method, spans in cell.get("timelines", {}).items():
            timeline = Timeline([Span(**span) for span in spans])
            stem = out / f"offload-timeline-{name_of(method).replace('+', '-')}"
            timeline.save(stem.with_suffix(".json"))
            save(plots.gantt(timeline, title=method), stem)
