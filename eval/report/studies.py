"""The measurement `offload` for readers: a file of rows, tables, and the pictures of docs/offloading.md."""

from __future__ import annotations

from pathlib import Path

import pandas

from kvlab import plots
from kvlab.measure.timeline import Span, Timeline
from kvlab.spec import name_of

from ..core.files import write_json
from ..studies.offload.simulated import AS_RUN, BY_ALPHA, OVERLAPPED, SPEEDUPS
from .plots import save


def report(measurement, store, show, wanted: list) -> None:
    """Write and print what every experiment found."""
    write(measurement.found(store, show.line), store.out)


def write(cells: dict[str, dict], out: Path) -> None:
    """Write OUT/offload.json, the rows of all experiments, and OUT/offload-machine.json; print the rows.
    Simulated latencies are drawn, and so are timelines of the modelled link, which are files for Perfetto
    besides."""
    write_json(out / "offload.json", [row for cell in cells.values() for row in cell["rows"]])
    for experiment, cell in cells.items():
        write_json(out / "offload-machine.json", cell["machine"])
        rows = pandas.DataFrame(cell["rows"]).drop(columns="experiment")
        print(f"\n{experiment}:\n{rows.to_string(index=False, na_rep='–', float_format='{:.5g}'.format)}")
        print(*cell.get("notes", ()), sep="\n")
        for method, spans in cell.get("timelines", {}).items():
            timeline = Timeline([Span(**span) for span in spans])
            stem = out / f"offload-timeline-{name_of(method).replace('+', '-')}"
            timeline.save(stem.with_suffix(".json"))
            save(plots.gantt(timeline, title=method), stem)
    if "latency" in cells:
        save(latency(cells["latency"]["rows"]), out / "offload-latency")


def latency(rows: list[dict], measured: dict[str, tuple[float, float]] | None = None):
    """Speed-ups by length and by model, and seconds of a prompt and its answer, simulated as the published
    numbers were run, which are beside it, and with overlap. measured: {system: (prefill, decode)} in seconds
    of a machine that was at hand."""
    figure, (left, right, models, bars) = plots.canvas(9.6, 7.0, 2, heights=(1, 1))
    by_length(left, rows, AS_RUN, BY_ALPHA)
    by_length(right, rows, OVERLAPPED)
    for row in rows:
        if row["published"] is not None and row["experiment"] == "latency":
            colour, marker, _ = plots.style(row["system"])
            left.plot(row["tokens"], row["published"], marker, color=colour, markerfacecolor="white")
    left.set_title("OPT-13B, batch 8: simulated as run (lines), published (open)", fontsize=10)
    right.set_title("OPT-13B, batch 8: simulated, overlapped", fontsize=10)

    sizes = ("OPT-6.7B", "OPT-13B", "OPT-30B")
    for name, value in matching(
        rows, *(f"faster than offload, {model}, batch 4, {AS_RUN.name}" for model in sizes)
    ):
        colour, marker, line = plots.style(name)
        models.plot(range(3), value, color=colour, marker=marker, ls=line, label=name)
    models.set(xticks=range(3), xticklabels=sizes, ylabel="times faster than FlexGen", ylim=(0, 5))
    models.set_title("2,048 tokens, batch 4: simulated as run", fontsize=10)

    wanted = [
        f"{part}, OPT-13B, batch 20, {run.name}"
        for run in (AS_RUN, OVERLAPPED)
        for part in ("prefill", "decode")
    ]
    seconds = dict(matching(rows, *wanted))
    names = [name for name in seconds if name != "full"]
    groups = [("simulated as run", [s[:2] for s in map(seconds.get, names)])]
    groups.append(("simulated, overlapped", [s[2:] for s in map(seconds.get, names)]))
    if measured:
        groups.append(("measured, H200 behind 16 GB/s", [measured.get(name, ()) for name in names]))
    for place, (label, values) in enumerate(groups):
        at = [x + 0.27 * (place - 1) for x in range(len(names))]
        bars.barh(at, [sum(value) for value in values], 0.25, color=GREYS[place], label=label)
        for y, total in zip(at, map(sum, values)):
            if total:
                bars.annotate(f"{total:.0f}", (total, y), xytext=(3, 0), textcoords="offset points",
                              va="center", fontsize=7.5)  # fmt: skip
    bars.set(yticks=range(len(names)), yticklabels=names, xlabel="seconds", xscale="log", xlim=(5, 6000))
    bars.invert_yaxis()
    bars.set_title("OPT-13B, 20 rows of 1,920 + 128 tokens", fontsize=10)
    for axes in (left, right, models, bars):
        axes.grid(True, axis="x" if axes is bars else "y")
        axes.tick_params(labelsize=9)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(9)
        axes.legend(frameon=False, fontsize=8, loc="lower right" if axes is bars else "best")
    return figure


GREYS = ("#4c5b73", "#9aa7bb", "#d58b3a")


def matching(rows: list[dict], *labels: str) -> list[tuple[str, list[float]]]:
    """(system, values) of the systems that have a row with every label, in the labels' order."""
    found: dict[str, dict] = {}
    for row in rows:
        name, _, what = row["system"].partition(": ")
        if what in labels:
            found.setdefault(name, {})[what] = row["value"]
    return [
        (name, [one[label] for label in labels]) for name, one in found.items() if len(one) == len(labels)
    ]


def by_length(axes, rows: list[dict], *runs) -> None:
    """Speed-ups over FlexGen by the tokens in all; of the runs after the first, InfiniGen's, dotted."""
    for run in runs:
        lines: dict[str, dict] = {}
        for row in rows:
            name, _, what = row["system"].partition(": ")
            if what == f"faster than offload, OPT-13B, batch 8, {run.name}":
                lines.setdefault(name, {})[row["tokens"]] = row["value"]
        for name, points in lines.items():
            if run is not runs[0] and name != "infinigen":
                continue
            colour, marker, line = plots.style(name)
            label = name if run is runs[0] else f"{name}, alpha's counts on SmolLM2"
            line = line if run is runs[0] else ":"
            axes.plot(*zip(*points.items(), strict=True), color=colour, marker=marker, ls=line, label=label)
    lengths = sorted(SPEEDUPS["infinigen"])
    axes.set(
        xlabel="tokens",
        ylabel="times faster than FlexGen",
        ylim=(0, 10.5),
        xticks=lengths,
        xticklabels=lengths,
    )
