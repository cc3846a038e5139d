"""Budgets: accuracy against bytes held and moved, one line per method from budget to budget, task by task."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from kvlab.plots import INK

from ..core.numbers import is_share
from .plots import looks

PANELS = (
    (("device_bytes_of_full", "host_bytes_of_full"), "bytes held, device and host"),
    (("moved_bytes_of_full",), "bytes moved per step"),
)


HIDES = 4.0  # hundredths of the axis of accuracy within which a marker hides another


def drawable(rows: list[dict], points: bool = False) -> list[dict]:
    """The rows that the picture is made of: shares of right answers, where `full` says what bytes are of;
    none where no method has several budgets. points: one budget will do, on tasks of several methods."""
    found = [
        row
        for row in rows
        if is_share(row) and row["value"] is not None and row["device_bytes_of_full"] is not None
    ]
    budgets: dict[str, set] = {}
    for row in found:
        budgets.setdefault(row["curve"], set()).add(row["budget"])
    if points:
        methods = {task: {row["method"] for row in found if row["task"] == task} for task in tasks_of(found)}
        return [row for row in found if len(methods[row["task"]]) > 1]
    return found if any(len(some) > 1 for some in budgets.values()) else []


def tasks_of(rows: list[dict]) -> list[str]:
    """The tasks of these rows, in their order."""
    return list(dict.fromkeys(row["task"] for row in rows))


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (bytes, accuracy) that no other point beats, by growing bytes: Pareto's front."""
    kept: list[tuple[float, float]] = []
    for size, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or value > kept[-1][1]:
            kept.append((size, value))
    return kept


def curves(rows: list[dict]) -> Figure:
    """Rows of one model and one protocol as `rows.rows` makes them: a line of panels for each task, standard
    errors as bars, the front of what is held in grey; no panel of bytes moved where nothing moves."""
    tasks = tasks_of(rows)
    panels = PANELS if any(row["moved_bytes_of_full"] for row in rows) else PANELS[:1]
    figure = Figure(figsize=(5.2 * len(panels), 3.3 * len(tasks) + 0.9), layout="constrained")
    grid = figure.subplots(len(tasks), len(panels), sharey="row", squeeze=False)
    lines, look = {}, looks(row["curve"] for row in rows)
    for task, axes in zip(tasks, grid, strict=True):
        mine = [row for row in rows if row["task"] == task]
        for (names, what), panel in zip(panels, axes, strict=True):
            there = [row for row in mine if len(names) > 1 or row[names[0]] or row["method"] == "full"]
            lines |= _panel(panel, there, names, highest(mine), look)
            panel.set_xlabel(f"{what}, % of what full holds")
            panel.grid(True)
            panel.set_axisbelow(True)
        compared = mine[0]["compared"]
        axes[0].set_ylabel(f"{task}\nper cent right" + ("" if compared else ", full at chance"))
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=3 * len(panels) + 1,
        frameon=False,
        fontsize=8,
    )
    return figure


def beside(points: dict[str, tuple[float, float]]) -> dict[str, float]:
    """{name: how far it is drawn from its place}, so that no point hides another: of (bytes, accuracy,
    in hundredths of its axis)."""
    sizes = [x for x, _ in points.values()]
    step = 0.011 * ((max(sizes) - min(sizes)) or 1.0) if sizes else 0.0
    placed, aside = [], {}
    for name, (x, y) in points.items():
        for turn in (0, 1, -1, 2, -2, 3, -3):
            at = x + turn * step
            if not any(abs(at - one) < 0.9 * step and abs(y - other) < HIDES for one, other in placed):
                break
        placed.append((at, y))
        aside[name] = at - x
    return aside


def _panel(axes, rows: list[dict], names: tuple[str, ...], top: float, look: dict) -> dict:
    """One task's methods against the sum of some bytes, up to `top` per cent; returns {curve: its line}.
    look: {curve: how it is drawn}."""
    lines, points = {}, []
    sums = {row["method"]: 100 * sum(row[name] for name in names) for row in rows}
    single = len({row["curve"] for row in rows}) == len(rows)  # no lines, so points may hide one another
    aside = beside(
        {row["method"]: (sums[row["method"]], 100 / top * 100 * row["value"]) for row in rows}
        if single
        else {}
    )
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [(sums[row["method"]], row) for row in rows if row["curve"] == curve]
        mine.sort(key=lambda one: one[0])
        xs, ys = [x for x, _ in mine], [100 * row["value"] for _, row in mine]
        errors = [100 * (row["stderr"] or 0) for _, row in mine]
        drawn = [x + aside.get(row["method"], 0.0) for x, row in mine]
        lines[curve] = axes.errorbar(
            drawn, ys, yerr=errors, lw=1.3, ms=6, mec=INK, mew=0.5, elinewidth=0.8, capsize=2,
            **look[curve] | ({} if len(mine) > 1 else {"ls": "none"}),
        )  # fmt: skip
        points += zip(xs, ys, strict=True)
    if len(names) > 1:
        axes.step(*zip(*front(points), strict=True), where="post", color=INK, alpha=0.25, lw=4, zorder=0)
    chance = rows[0]["chance"]
    if chance:
        axes.axhline(100 * chance, color=INK, lw=0.8, ls=":")
    axes.set_ylim(-0.03 * top, 1.03 * top)
    return lines


def highest(rows: list[dict]) -> float:
    """The end of the axis of these rows' per cents: 100, or the next ten if all are in the lower half."""
    most = max(100 * (row["value"] + (row["stderr"] or 0)) for row in rows)
    most = max(most, 100 * (rows[0]["chance"] or 0))
    return 100.0 if most > 50 else 10.0 * max(1, math.ceil(most / 10))
