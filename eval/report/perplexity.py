"""The study `perplexity` for the eye: perplexity.json, and loss against position beside that of `full`."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from kvlab.plots import INK, style

from ..core.files import write_json
from . import plots
from .budgets import front

KEPT = ("model", "method", "task", "config", "perplexity", "values", "rows", "bytes", "scored", "made")


def write(cells: list[dict], out: Path, show) -> None:
    """perplexity.json and perplexity.svg/png from the cells of one run."""
    if not cells:
        return
    write_json(out / "perplexity.json", [{name: cell.get(name) for name in KEPT} for cell in cells])
    plots.save(drawn(cells), out / "perplexity")
    for cell in cells:
        show.line(f"{cell['method']}: perplexity {cell['perplexity']:.2f}")
    show.line(f"perplexity: {out / 'perplexity.json'}")


def bits(row: dict, full: dict) -> float:
    """Bits that a number of K and V takes, scales and windows included: by the bytes that were held."""
    width = 16 if row["dtype"] in ("bfloat16", "float16") else 32
    return width * row["bytes"]["device_bytes"] / full["bytes"]["device_bytes"]


def against_bits(rows: list[dict]) -> Figure:
    """One model's rows: perplexity against true bits, two standard errors over chunks as bars; the front that
    no other format beats in grey."""
    full = next(row for row in rows if row["method"] == "full")
    figure = Figure(figsize=(8.8, 5.4), layout="constrained")
    axes = figure.add_subplot()
    points = []
    for row in sorted(rows, key=lambda one: bits(one, full)):
        colour, marker, _ = style(row["method"])
        x, y = bits(row, full), row["perplexity"]
        error = 2 * y * beyond(row, full)
        axes.errorbar(x, y, yerr=error, color=colour, marker=marker, ms=7, mec=INK, mew=0.5, elinewidth=0.8)
        points.append((x, y, row["method"]))
    best = [(x, -y) for x, y, _ in points]
    xs, ys = zip(*front(best), strict=True)
    axes.step(xs, [-y for y in ys], where="post", color=INK, alpha=0.25, lw=4, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(1.8, 40))
    axes.set_xlabel("bits per number of K and V, scales and windows included")
    axes.set_ylabel("perplexity")
    axes.set_xticks([2, 3, 4, 5, 6, 8, 16, 32], ["2", "3", "4", "5", "6", "8", "16", "32"])
    axes.minorticks_off()
    axes.grid(True)
    figure.draw_without_rendering()
    place = axes.transData + axes.transAxes.inverted()
    plots.label_right(axes, [(*place.transform((x, y)), name) for x, y, name in points], 0.042)
    return figure


def beyond(row: dict, full: dict) -> float:
    """Standard error, over chunks, of the mean loss beyond `full`'s."""
    gaps = [mine - theirs for mine, theirs in zip(row["values"], full["values"], strict=True)]
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((one - mean) ** 2 for one in gaps) / max(1, len(gaps) - 1) / len(gaps))


def drawn(cells: list[dict]) -> Figure:
    """Every method's loss against position; where `full` is there, what a method loses beside it."""
    full = next((cell for cell in cells if cell["method"] == "full"), None)
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for cell in cells:
        if full is not None and cell is full:
            continue
        xs = [row["position"] + row["tokens"] / 2 for row in cell["rows"]]
        ys = [row["loss"] for row in cell["rows"]]
        if full is not None:
            ys = [y - row["loss"] for y, row in zip(ys, full["rows"], strict=True)]
        colour, marker, line = style(cell["method"])
        axes.plot(xs, ys, color=colour, marker=marker, ls=line, lw=1.4, ms=5, mec=INK, mew=0.4,
                  label=cell["method"])  # fmt: skip
    axes.grid(True)
    axes.set_xlabel("position in the chunk, tokens")
    axes.set_ylabel("loss, nats per token" if full is None else "loss beyond full's, nats per token")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, ncols=2)
    return figure
