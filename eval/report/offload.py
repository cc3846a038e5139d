"""The study `offload` for the eye: offload.json, a figure for each experiment, drawn from its rows alone, and
timelines of the modelled link as pictures and as trace files for Perfetto."""

from __future__ import annotations

import re
from pathlib import Path

from kvlab import plots
from kvlab.measure.timeline import Span, Timeline
from kvlab.spec import name_of

from ..studies.offload.simulated import AS_RUN, GIB, LINKS, OVERLAPPED, PARTS
from .plots import save
from .table import write_rows

UNITS = {"GiB/s": GIB / 1e9}  # in GB/s


def report(measurement, store, show, wanted: list) -> None:
    """Write what is stored, and draw it: `offload-NAME.svg` and `.png` in its folder."""
    write(measurement.found(store, show.line), store.out, show)


def write(cells: dict[str, dict], out: Path, show) -> None:
    write_rows(cells, out, "offload", show, line)
    for name, cell in cells.items():
        save(FIGURES[name](cell["rows"]), out / f"offload-{name}")
        for method, spans in cell.get("timelines", {}).items():
            timeline = Timeline([Span(**span) for span in spans])
            stem = out / f"offload-timeline-{name_of(method).replace('+', '-')}"
            timeline.save(stem.with_suffix(".json"))
            save(plots.gantt(timeline, title=method), stem)


def line(row: dict) -> str:
    """A row as one line."""
    tokens = "" if row["tokens"] is None else f" at {row['tokens']:,} tokens"
    published = "" if row["published"] is None else f" (published {row['published']:g})"
    return f"  {row['system']}{tokens}: {row['value']:.5g} {row['unit']}, {row['kind']}{published}"


def series(rows: list[dict], pattern: str) -> dict:
    """{label: {x: value}} of the rows whose system matches; groups `label` and `x` of the pattern (x: by
    default the tokens)."""
    found: dict = {}
    for row in rows:
        match = re.fullmatch(pattern, row["system"])
        if match:
            groups = match.groupdict()
            x = float(groups["x"]) if groups.get("x") else row["tokens"]
            found.setdefault(groups["label"], {})[x] = row["value"]
    return found


def systems(rows: list[dict]) -> list[str]:
    """What stands before the colon of a row's system: a method, or a model."""
    return list(dict.fromkeys(name_of(row["system"]) for row in rows))


def curves(axes, found: dict, **labels) -> None:
    """Lines with markers in the methods' colours, labelled at their right ends."""
    for label, points in found.items():
        colour, marker, line = plots.style(label)
        axes.plot(
            list(points), list(points.values()), color=colour, marker=marker, linestyle=line, label=label
        )
    axes.set(**labels)
    axes.grid(True, axis="y")
    axes.legend(frameon=False, fontsize=8.5)


def per_model(rows, pattern: str, **labels):
    """A panel for each model; `pattern` is that of what follows the model's name."""
    names = systems(rows)
    figure, columns = plots.canvas(4.2 * len(names), 3.2, len(names))
    for axes, name in zip(columns, names, strict=True):
        curves(axes, series(rows, rf"{re.escape(name)}: {pattern}"), title=name, **labels)
    return figure


def similarity(rows):
    labels = {"xlabel": "layer", "ylabel": "cosine with the block's input", "ylim": (-0.2, 1.02)}
    return per_model(rows, r"(?P<label>[\w ]+), layer (?P<x>\d+)", **labels)


def recall(rows):
    labels = {"xlabel": "part of the columns", "ylabel": "true top tenth found", "ylim": (0, 1.02)}
    return per_model(rows, r"(?P<label>plain|skewed), ratio (?P<x>[\d.]+), mean", **labels)


def sensitivity(rows):
    figure, columns = plots.canvas(8.4, 3.2, 2)
    for axes, knob, label in zip(columns, ("alpha", "ratio"), ("alpha", "partial ratio"), strict=True):
        right = axes.twinx()
        accuracy = series(rows, rf"(?P<label>{knob})=(?P<x>[\d.]+): accuracy")[knob]
        latency = series(rows, rf"(?P<label>{knob})=(?P<x>[\d.]+): latency")[knob]
        (first, *_), (second, *_) = plots.OTHERS[:2]  # neither is a method
        axes.plot(list(accuracy), list(accuracy.values()), "o-", color=first)
        right.plot(list(latency), list(latency.values()), "s--", color=second)
        axes.set(xlabel=label, ylabel="accuracy, % (circles)", ylim=(0, 103))
        right.set(ylabel="ms/token (squares)", ylim=(0, None))
    return figure


def latency(rows):
    """Simulated as the published numbers were run, which stand beside it, and with overlap."""
    figure, columns = plots.canvas(8.4, 3.6, 2)
    for axes, run in zip(columns, (AS_RUN, OVERLAPPED), strict=True):
        label = rf"(?P<label>[\w+]+): faster than offload, OPT-13B, batch 8, {run.name}"
        curves(axes, series(rows, label), xlabel="tokens", ylabel="times faster than FlexGen", ylim=(0, 6.5))
        axes.set_title(f"OPT-13B, batch 8, simulated: {run.name}", fontsize=10)
    for row in rows:
        if row["published"] is not None:
            colour, marker, _ = plots.style(row["system"])
            columns[0].plot(row["tokens"], row["published"], marker, color=colour, markerfacecolor="white")
    columns[0].set_title("OPT-13B, batch 8: simulated as run (lines), published (open)", fontsize=10)
    return figure


def breakdown(rows):
    """Of the run as it was published."""
    rows = [row for row in rows if row["system"].endswith(AS_RUN.name)]
    names = systems(rows)
    values = {row["system"]: row["value"] for row in rows}
    figure, (axes,) = plots.canvas(7.2, 3.2)
    left = dict.fromkeys(names, 0.0)
    for part in PARTS:
        width = [values[f"{system}: {part}, {AS_RUN.name}"] for system in names]
        colour, hatch, _ = plots.SPANS[part]
        axes.barh(names, width, left=list(left.values()), color=colour, hatch=hatch, edgecolor=plots.INK,
                  linewidth=0.4, label=part)  # fmt: skip
        left = {system: left[system] + w for system, w in zip(names, width, strict=True)}
    axes.set(xlabel="ms per layer, 8 rows of 2,048 tokens, as published")
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def link(rows):
    values = {
        name_of(row["system"]).replace("ideal", "full"): round(row["value"])
        for row in rows
        if row["unit"] == "ms/token" and ": " not in row["system"] and row["kind"] != "simulated"
    }
    return plots.bars(
        values, x=f"ms/token at {rows[0]['tokens']:,} tokens over the modelled link (full: the ideal)"
    )


def pool(rows):
    figure, columns = plots.canvas(8.4, 3.2, 2)
    for axes, what in zip(columns, ("accuracy", "perplexity"), strict=True):
        found = series(rows, rf"(?P<label>\w+), (?P<x>\d+)% of the host memory: {what}")
        for points in found.values():  # with all of the memory there are no victims
            points.update(found.get("any", {}))
        found.pop("any", None)
        if found:
            curves(axes, found, xlabel="host memory, % of what all tokens need", ylabel=what)
    return figure


def bandwidth(rows):
    figure, (axes,) = plots.canvas(6.8, 3.6)
    found = [row | {"value": row["value"] * UNITS.get(row["unit"], 1.0)} for row in rows]
    curves(axes, series(found, r"(?P<label>.+), decode"), xlabel="tokens", ylabel="required GB/s",
           xscale="log", yscale="log")  # fmt: skip
    for name, carries in LINKS.items():
        axes.axhline(carries / 1e9, color=plots.INK, linewidth=0.8, linestyle=":")
        axes.annotate(name, (1.0, carries / 1e9), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                      fontsize=8.5)  # fmt: skip
    return figure


def accuracy(rows):
    figure, (axes,) = plots.canvas(6.8, 3.6)
    found = series(rows, r"(?P<label>\w+):budget=(?P<x>[\d.]+)")
    labels = {"xlabel": "part of the tokens held or fetched", "ylabel": "questions answered, %"}
    curves(axes, found, xscale="log", **labels)
    for row in rows:
        if ":" not in row["system"]:
            axes.axhline(row["value"], color=plots.style(row["system"])[0], linewidth=0.8, linestyle=":")
            axes.annotate(
                row["system"], (0.0, row["value"]), xycoords=("axes fraction", "data"), fontsize=8.5
            )
    return figure


FIGURES = {
    function.__name__: function
    for function in (similarity, recall, sensitivity, latency, breakdown, link, pool, bandwidth, accuracy)
}
