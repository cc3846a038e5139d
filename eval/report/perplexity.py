"""The study `perplexity` for readers: perplexity.json, and loss against position beside that of `full`."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from kvlab.plots import INK

from ..core.files import write_json
from . import plots
from .budgets import front

KEPT = ("model", "method", "task", "config", "perplexity", "values", "rows", "bytes", "scored", "made")


NOISE = 0.005  # nats: what costs less is drawn there


def report(measurement, store, show, wanted: list) -> None:
    """perplexity.json and perplexity.svg/png from the cells of one run."""
    cells, out = [cell for cell in map(store.load, wanted) if cell], store.out
    if not cells:
        return
    write_json(out / "perplexity.json", [{name: cell.get(name) for name in KEPT} for cell in cells])
    plots.save(drawn(cells), out / "perplexity")
    for cell in cells:
        show.line(f"{cell['method']}: perplexity {cell['perplexity']:.2f}")
    show.line(f"perplexity: {out / 'perplexity.json'}")


def bits(row: dict, full: dict) -> float:
    """Bits that a number of K and V takes, scales and windows included: by the bytes that were held."""
    width = 16 if row.get("dtype") in ("bfloat16", "float16") else 32
    return width * row["bytes"]["device_bytes"] / full["bytes"]["device_bytes"]


def against_bits(rows: list[dict]) -> Figure:
    """One model's rows: a token's cost beyond `full` against true bits, standard errors over chunks as bars;
    costs below NOISE are drawn at the bottom; the front that no other format beats in grey."""
    full = next(row for row in rows if row["method"] == "full")
    figure = Figure(figsize=(8.8, 5.4), layout="constrained")
    axes = figure.add_subplot()
    points, look = [], plots.looks(row["method"] for row in rows)
    for row in sorted(rows, key=lambda one: bits(one, full)):
        if row is full:
            continue
        x, y, error = bits(row, full), math.log(row["perplexity"] / full["perplexity"]), beyond(row, full)
        low = y - max(NOISE / 2, y - error)  # a bar that goes below the axis ends there
        y = max(NOISE, y)
        around = [[max(0.0, min(low, y))], [error]]
        axes.errorbar(x, y, yerr=around, ms=7, mec=INK, mew=0.5, elinewidth=0.8, **look[row["method"]])
        points.append((x, y, row["method"]))
    xs, ys = zip(*front([(x, -y) for x, y, _ in points]), strict=True)
    axes.step(xs, [-y for y in ys], where="post", color=INK, alpha=0.25, lw=4, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(2, 9.5), ylim=(NOISE / 1.5, None))
    axes.set_xlabel("bits per number of K and V, scales and windows included")
    axes.set_ylabel("loss beyond full's, nats per token")
    axes.set_xticks([2, 3, 4, 5, 6, 8], ["2", "3", "4", "5", "6", "8"])
    ticks = [NOISE, 0.01, 0.03, 0.1, 0.3, 1, 3]
    axes.set_yticks(ticks, [f"≤ {NOISE}", *(f"{tick:g}" for tick in ticks[1:])])
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
    look = plots.looks(cell["method"] for cell in cells)
    for cell in cells:
        if full is not None and cell is full:
            continue
        xs = [row["position"] + row["tokens"] / 2 for row in cell["rows"]]
        ys = [row["loss"] for row in cell["rows"]]
        if full is not None:
            ys = [y - row["loss"] for y, row in zip(ys, full["rows"], strict=True)]
        axes.plot(xs, ys, lw=1.4, ms=5, mec=INK, mew=0.4, label=cell["method"], **look[cell["method"]])
    axes.grid(True)
    axes.set_xlabel("position in the chunk, tokens")
    axes.set_ylabel("loss, nats per token" if full is None else "loss beyond full's, nats per token")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, ncols=2)
    return figure
