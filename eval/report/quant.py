"""The study `quant` for the eye: quant.json, and `quant-bits` and `quant-drift` as SVG and PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from kvlab import plots

from ..studies.quant import LAST
from .plots import label_above, save
from .table import write_rows


def report(measurement, store, show, wanted: list) -> None:
    """Write what is stored, and draw it."""
    out: Path = store.out
    rows = write_rows(measurement.found(store, show.line), out, "quant", show, line)
    for name, draw in (("bits", bits_figure), ("drift", drift_figure)):
        mine = [row for row in rows if row["experiment"] == name]
        if mine:
            save(draw(mine), out / f"quant-{name}")


def line(row: dict) -> str:
    """A row as one line."""
    value = f"{row['metric']} {row['value']:.4g} {row['unit']}".strip()
    return f"  {row['method']}: {value} at {row['tokens']} tokens"


def bits_figure(rows: list[dict]):
    """Accuracy, and below it perplexity, against true bits per value."""
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    found: dict[str, dict] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["metric"]] = row["value"]
    for panel, metric in zip(panels, ("accuracy", "perplexity"), strict=True):
        for method, one in found.items():
            colour, marker, _ = plots.style(method)
            panel.plot(one["bits per value"], one[metric], marker, color=colour, mec=plots.INK, mew=0.5, ms=7)
        panel.grid(True)
    upper, lower = panels
    upper.margins(y=0.2)
    upper.set(ylabel="questions answered, %", xscale="log", xlim=(1.9, 40))
    lower.set(ylabel="perplexity", xlabel="bits per value, scales and windows included", yscale="log")
    lower.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    lower.minorticks_off()
    values = [one["perplexity"] for one in found.values()]
    steps = [step for step in range(0, 2000, 10) if min(values) - 10 < step < max(values) + 10]
    lower.set_yticks(steps, map(str, steps))
    place = upper.transData + upper.transAxes.inverted()
    label_above(
        upper,
        [
            (*place.transform((one["bits per value"], one["accuracy"])), method)
            for method, one in sorted(found.items(), key=lambda item: item[1]["bits per value"])
        ],
    )
    return figure


def drift_figure(rows: list[dict]):
    """Perplexity along a long text, over that of the full cache on the same tokens."""
    figure, (panel,) = plots.canvas(6.4, 3.6)
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["metric"] == "perplexity":
            curves.setdefault(row["method"], {})[row["tokens"]] = row["value"]
    full = curves.pop("full")
    for name, curve in curves.items():
        line = "--" if "re-quantized" in name else ":" if "per token" in name else "-"
        colour, marker, _ = plots.style(name.partition(",")[0])
        excess = [100 * (value / full[tokens] - 1) for tokens, value in curve.items()]
        panel.plot(list(curve), excess, line, marker=marker, ms=5, color=colour, label=name)
    panel.axhline(0, color=plots.INK, lw=1)
    panel.set(xlabel="tokens decoded", ylabel=f"perplexity of {LAST} tokens,\n% above the full cache's")
    panel.grid(True)
    panel.legend(frameon=False, fontsize=8.5)
    return figure
