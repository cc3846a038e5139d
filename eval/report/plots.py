"""The report's plots: accuracy against bytes held and moved, milliseconds against context.

Okabe-Ito colours, a marker of its own for every method, labels beside the points: readable in grey
and without a legend. Every figure is drawn once and returned as SVG text (also for the page, which
turns the ink into the reader's text colour) and written as SVG and PNG.
"""

from __future__ import annotations

import io
import math
import re
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from kvlab.plots import GRID, INK, SETTINGS, STYLE, number, spread, style
from kvlab.spec import name_of

from ..core.files import write_file

SHADES = (0.0, -0.42, 0.4)  # of a colour: as it is, darker, lighter
FILLS = ("full", "none", "left", "right", "top", "bottom")  # of the mark of one name's several specs
NOBODY = {  # a picture is the same bytes every time
    "svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None},
}  # fmt: skip


def looks(methods) -> dict[str, dict]:
    """How each of these specs is drawn: colour, mark, line, fill. Colour and mark are a name's own in every
    picture: its family's colour (`kvlab.plots`) in one of three shades, so that neighbours differ. Specs of
    one name differ in their fill."""
    families: dict[str, list[str]] = {}
    for name, (colour, *_) in STYLE.items():
        families.setdefault(colour, []).append(name)
    names: dict[str, list[str]] = {}
    for method in dict.fromkeys(methods):
        names.setdefault(name_of(method), []).append(method)
    found = {}
    for name, specs in names.items():
        colour, marker, line = style(name)
        by = families[colour].index(name) if name in STYLE else number(name) // 16
        colour = shaded(colour, SHADES[by % len(SHADES)])
        for fill, method in zip(cycle(FILLS), specs):
            found[method] = {"color": colour, "marker": marker, "ls": line, "fillstyle": fill}
    return found


def shaded(colour: str, by: float) -> str:
    """A colour, mixed with white (by > 0) or black."""
    target = np.ones(3) if by > 0 else np.zeros(3)
    return to_hex((1 - abs(by)) * np.array(to_rgb(colour)) + abs(by) * target)


def labels(axes, points: list[tuple[float, float, str]], along: int, gap: tuple, placed) -> None:
    """Names, each joined to its point (x, y, name) and spread along x (0) or y (1). gap: how far apart, and
    from where to where. placed: (x, its place) -> where the name is, where its line ends on it, and its
    alignment."""
    points, look = within(axes, points), looks(name for *_, name in points)
    places = spread([point[along] for point in points], *gap)
    for (x, y, name), place in zip(points, places, strict=True):
        where, relpos, how = placed(x, place)
        arrow = {"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "shrinkB": 5, "relpos": relpos}
        axes.annotate(
            name,
            xy=(x, y),
            xytext=where,
            xycoords="axes fraction",
            textcoords="axes fraction",
            arrowprops=arrow | {"color": look[name]["color"]},
            annotation_clip=False,
            parse_math=False,
            **how,
        )


def above(x: float, place: float) -> tuple:
    """In a slanted row above the axes."""
    return (place, 1.03), (0, 0), {"rotation": 50, "ha": "left", "va": "bottom"}


def beside(x: float, height: float) -> tuple:
    """Right of its point, at the right edge left of it."""
    left = x > 0.7
    how = {"ha": "right" if left else "left", "va": "center"}
    return (x - 0.05 if left else x + 0.05, height), (left, 0.5), how


def in_column(x: float, height: float) -> tuple:
    """In a column right of the axes."""
    return (1.05, height), (0, 0.5), {"va": "center"}


def within(axes, points: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points in axes coordinates, 0 to 1."""
    to_axes = axes.transData + axes.transAxes.inverted()
    return [(*to_axes.transform((x, y)), name) for x, y, name in points]


def framed() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True)
    axes.set_axisbelow(True)
    return figure, axes


def against_bytes(points: list[dict], what: str) -> Figure:
    """Mean accuracy against a share of the full cache's bytes, on a logarithmic axis with a place for 0.

    points: {method, accuracy (0 to 1), stderr or None, x (share), total (share with the host, or None)}.
    """
    figure, axes = framed()
    shares = [value for p in points for value in (p["x"], p.get("total")) if value]
    least, most = min(shares, default=0.1), max([1.0, *shares])
    zero = least / 3  # where "nothing" is drawn, left of all others
    lowest = min(p["accuracy"] - (p["stderr"] or 0) for p in points)
    bottom = max(0.0, math.floor(lowest * 10 - 0.5) / 10)
    top = min(1.06, math.ceil(max(p["accuracy"] for p in points) * 10 + 0.5) / 10)
    named, look = [], looks(p["method"] for p in points)
    for p in points:
        mark = look[p["method"]] | {"ls": "none"}
        colour = mark["color"]
        x = p["x"] or zero
        if p.get("total") and p["total"] > p["x"] * 1.02:
            axes.plot([x, p["total"]], [p["accuracy"]] * 2, color=colour, lw=1.2, ls=":")
            axes.plot(p["total"], p["accuracy"], "|", color=colour, ms=11, mew=1.5)
        drawn = axes.errorbar(
            x, p["accuracy"], yerr=p["stderr"], ms=9, capsize=2, elinewidth=1, mec=INK, mew=0.6, zorder=3,
            **mark,
        )  # fmt: skip
        drawn.lines[0].set_clip_on(False)  # a mark at 0 is whole
        named.append((x, p["accuracy"], p["method"]))
    axes.set_xscale("log")
    axes.set_xlim(zero / 1.8, most * 1.5)
    axes.set_ylim(bottom, top)
    steps = (1,) if most / least > 20 else (1, 2, 5)
    ticks = [m * 10.0**e for e in range(-6, 3) for m in steps]
    ticks = [t for t in ticks if zero * 2 <= t < most * 1.5]
    axes.set_xticks([zero, *ticks], ["0", *(f"{100 * t:g} %" for t in ticks)])
    axes.minorticks_off()
    axes.set_xlabel(f"{what}, share of what the full cache holds")
    axes.set_ylabel("mean accuracy over the tasks")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    middle = sum(axes.get_ylim()) / 2  # lines from low points to names above would cross the others
    high = sorted((one for one in named if one[1] >= middle), key=lambda one: (one[0], -one[1]))
    labels(axes, high, 0, (0.072, 0.02, 0.98), above)
    labels(axes, [one for one in named if one[1] < middle], 1, (0.065, 0.03, 1.0), beside)
    return figure


def against_context(rows: list[dict]) -> Figure:
    """Decode milliseconds per token against context; rows as in speed.json, one model."""
    figure, axes = framed()
    methods = list(dict.fromkeys(row["method"] for row in rows))
    look = looks(methods)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for method in methods:
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["context"])
        xs, ys = [r["context"] for r in mine], [r["decode_ms"] for r in mine]
        low = [y - r.get("decode_ms_min", y) for y, r in zip(ys, mine, strict=True)]
        high = [r.get("decode_ms_max", y) - y for y, r in zip(ys, mine, strict=True)]
        spread = [[max(v, 0) for v in low], [max(v, 0) for v in high]]
        axes.errorbar(
            xs, ys, yerr=spread, lw=1.5, ms=6, mec=INK, mew=0.5, elinewidth=0.8, capsize=2, **look[method],
        )  # fmt: skip
        ends.append((xs[-1], ys[-1], method))
    contexts = sorted({r["context"] for r in rows})
    axes.set_xticks(contexts, [str(c) if c < 1024 else f"{c // 1024}k" for c in contexts])
    axes.minorticks_off()
    for ends_of, set_ends in ((axes.get_xlim, axes.set_xlim), (axes.get_ylim, axes.set_ylim)):
        low, high = ends_of()
        if high < 1.01 * low:  # of a single point: matplotlib would leave the axis no length
            set_ends(low / 2, high * 2)
    low, high = axes.get_ylim()
    ticks = [m * 10**e for e in range(-3, 6) for m in (1, 2, 5) if low <= m * 10**e <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("decode, milliseconds per token")
    labels(axes, ends, 1, (0.057, 0.0, 1.0), in_column)
    return figure


def draw(make, path: Path) -> str:
    """Draw what `make()` returns, write PATH.svg and PATH.png (white ground), return the SVG text."""
    with matplotlib.rc_context(SETTINGS):
        save(make(), path, dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.08)
    return path.with_suffix(".svg").read_text(encoding="utf-8")


def save(figure: Figure, stem: Path, *forms: str, dpi: int = 144, **look) -> None:
    """Write a figure as STEM.svg and STEM.png, or in these forms only, the same bytes every time."""
    with matplotlib.rc_context(SETTINGS):
        for form in forms or ("svg", "png"):
            made = io.BytesIO()
            figure.savefig(made, format=form, dpi=dpi, metadata=NOBODY[form], **look)
            write_file(stem.with_suffix(f".{form}"), made.getvalue())


def for_page(svg: str, name: str, title: str) -> str:
    """An SVG file's text, adapted to a page: unique ids, a title, the reader's colours."""
    label = f'<title id="{name}-title">{title}</title>'
    opening = rf'<svg viewBox="\1" role="img" aria-labelledby="{name}-title">{label}'
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', opening, svg, count=1, flags=re.S)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return re.sub(r"fill: ?#ffffff", "fill: none", svg)
