"""The studies for the eye: files of rows, tables, and what docs/offloading.md shows."""

from __future__ import annotations

from pathlib import Path

import pandas

from kvlab import plots
from kvlab.measure.timeline import Span, Timeline
from kvlab.spec import name_of

from ..core.files import write_json
from ..studies.offload.simulated import AS_RUN, OVERLAPPED
from .plots import save


def report(measurement, store, show, wanted: list) -> None:
    """Write and print what every experiment found."""
    cells = measurement.found(store, show.line)
    if measurement.name == "static-graph":
        by_label(cells, store.out)
    else:
        write(cells, store.out, measurement.name)


def by_label(cells: dict[str, dict], out: Path) -> None:
    """Write OUT/measured.json, {experiment: {threads, rows}}, whose rows are {label: numbers}; print them."""
    measured = {
        name: {"threads": cell["machine"]["threads"], "rows": cell["rows"]} for name, cell in cells.items()
    }
    write_json(out / "measured.json", measured)
    for name, found in measured.items():
        rows = pandas.Series(found["rows"]).apply(pandas.Series)
        print(
            f"\n{name}, {found['threads']} thread:\n{rows.to_string(na_rep='', float_format='{:.4g}'.format)}"
        )


def write(cells: dict[str, dict], out: Path, name: str) -> None:
    """Write OUT/NAME.json, the rows of all experiments, and OUT/NAME-machine.json; print the rows. Simulated
    latencies are drawn, and so are timelines of the modelled link, which are files for Perfetto besides."""
    write_json(out / f"{name}.json", [row for cell in cells.values() for row in cell["rows"]])
    for experiment, cell in cells.items():
        write_json(out / f"{name}-machine.json", cell["machine"])
        rows = pandas.DataFrame(cell["rows"]).drop(columns="experiment")
        print(f"\n{experiment}:\n{rows.to_string(index=False, na_rep='–', float_format='{:.5g}'.format)}")
        print(*cell.get("notes", ()), sep="\n")
        for method, spans in cell.get("timelines", {}).items():
            timeline = Timeline([Span(**span) for span in spans])
            stem = out / f"{name}-timeline-{name_of(method).replace('+', '-')}"
            timeline.save(stem.with_suffix(".json"))
            save(plots.gantt(timeline, title=method), stem)
    if "latency" in cells:
        save(latency(cells["latency"]["rows"]), out / f"{name}-latency")


def latency(rows: list[dict]):
    """Simulated as the published numbers were run, which stand beside it, and with overlap."""
    figure, columns = plots.canvas(8.4, 3.6, 2)
    for axes, run in zip(columns, (AS_RUN, OVERLAPPED), strict=True):
        lines: dict[str, dict] = {}
        for row in rows:
            name, _, what = row["system"].partition(": ")
            if what == f"faster than offload, OPT-13B, batch 8, {run.name}":
                lines.setdefault(name, {})[row["tokens"]] = row["value"]
        for name, points in lines.items():
            colour, marker, line = plots.style(name)
            axes.plot(*zip(*points.items(), strict=True), color=colour, marker=marker, ls=line, label=name)
        axes.set(xlabel="tokens", ylabel="times faster than FlexGen", ylim=(0, 6.5))
        axes.grid(True, axis="y")
        axes.legend(frameon=False, fontsize=8.5)
        axes.set_title(f"OPT-13B, batch 8, simulated: {run.name}", fontsize=10)
    for row in rows:
        if row["published"] is not None:
            colour, marker, _ = plots.style(row["system"])
            columns[0].plot(row["tokens"], row["published"], marker, color=colour, markerfacecolor="white")
    columns[0].set_title("OPT-13B, batch 8: simulated as run (lines), published (open)", fontsize=10)
    return figure
