"""Pictures of docs/gpu.md: attention beside flash, and the headline's steps beside the simulator's."""

from __future__ import annotations

from pathlib import Path

from kvlab import plots

from ..report.plots import save
from .tables import rows_of


def drawn(name: str, machine: dict, folder: Path) -> list[str]:
    """Draw attention and the headline as PNG files gpu-NAME-*.png; returns the Markdown that shows them."""
    lines = []
    rows = [
        row
        for row in rows_of(machine, "attention")
        if row["kernel"].startswith("kvlab") and row.get("speedup")
    ]
    groups = dict.fromkeys((row["shape"], row["batch"]) for row in rows)
    if groups:
        figure, columns = plots.canvas(3.4 * len(groups), 3.2, len(groups))
        for axes, (shape, batch) in zip(columns, groups, strict=True):
            here = sorted(
                (row for row in rows if (row["shape"], row["batch"]) == (shape, batch)), key=by_tokens
            )
            for kernel in dict.fromkeys(row["kernel"] for row in here):
                points = [(row["tokens"], row["speedup"]) for row in here if row["kernel"] == kernel]
                axes.plot(*zip(*points, strict=True), marker="o", label=kernel.removeprefix("kvlab "))
            axes.axhline(1, color=plots.INK, linewidth=0.8, linestyle=":")
            axes.set(xscale="log", xlabel="tokens", ylabel="times as fast as bf16 flash")
            axes.set_title(f"{shape}, batch {batch}", fontsize=9)
            axes.legend(frameon=False, fontsize=7)
        save(figure, folder / f"gpu-{name}-attention")
        lines.append(f"![{name}: times as fast as flash, by tokens](figures/gpu-{name}-attention.png)\n")
    bars = [row for row in rows_of(machine, "headline") if "step_ms" in row]
    groups = dict.fromkeys((row["prompt"], row["batch"], row["link"]) for row in bars)
    if groups:
        figure, columns = plots.canvas(3.4 * len(groups), 3.2, len(groups))
        for axes, (prompt, batch, link) in zip(columns, groups, strict=True):
            here = [
                row for row in bars if (row["prompt"], row["batch"], row["link"]) == (prompt, batch, link)
            ]
            names = [row["system"] for row in here]
            axes.barh(names, [row["step_ms"] for row in here], color=plots.BLUE, label="measured")
            guesses = [row["predicted"]["step_ms"] for row in here]
            axes.plot(guesses, names, "|", color=plots.VERMILLION, markersize=14, label="predicted")
            axes.set(xlabel="ms per step")
            axes.set_title(f"{prompt:,} tokens, batch {batch}, {link} link", fontsize=9)
            axes.invert_yaxis()
            axes.legend(frameon=False, fontsize=7)
        save(figure, folder / f"gpu-{name}-headline")
        lines.append(f"![{name}: steps measured and predicted](figures/gpu-{name}-headline.png)\n")
    return lines


def by_tokens(row: dict) -> int:
    return row["tokens"]
