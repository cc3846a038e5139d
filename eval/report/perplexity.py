"""The study `perplexity` for readers: perplexity.json, and loss against position beside that of `full`."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvlab.plots import INK

from ..core.files import write_json
from . import plots

KEPT = ("model", "method", "task", "config", "perplexity", "values", "rows", "bytes", "scored", "made")


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
