"""One visual language for the course and the reports: how each method looks, bars, and timelines.

A colour of Okabe and Ito, which colour-blind readers tell apart, means the same thing of a token and of a
method: blue is held exactly, sky blue rounded, orange computed now, vermillion comes over the link, yellow is
on the host. A method has the colour of its effect on a token. The other two, green and purple, are methods
that drop tokens: green by the attention they received while the text was read, purple by something else.
Anything else has none of these colours. Letters have one size: in a figure at most 8.8 inches wide and 3.4
high they are 24 pixels high on a slide. Figures are made without pyplot, and the same call draws the same
figure in a notebook, on a page or in a test.
"""

from __future__ import annotations

from itertools import pairwise
from zlib import crc32

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .finding import PROFILED
from .methods import METHODS
from .spec import name_of

INK, GRID = "#1f2328", "#c9ced6"
BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILLION, PURPLE, GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#7a7f87",
)  # fmt: skip
OCHRE = "#a89c00"  # yellow, dark enough for a line on white

COLOURS = {
    "blue": BLUE, "sky": SKY, "green": GREEN, "ochre": OCHRE, "orange": ORANGE, "vermillion": VERMILLION,
    "purple": PURPLE,
}  # fmt: skip
# Methods: (colour, marker, line). The colour shows the fate of a token; marker and line distinguish methods.
LOOKS = {name: one.look.split() for name, one in (METHODS | PROFILED).items()}
STYLE = {name: (COLOURS[colour], marker, line) for name, (colour, marker, line) in LOOKS.items()} | {
    "hf-dynamic": (GREY, "<", "-"),
    "hf-static": (GREY, ">", "--"),
    "hf-quantized": (GREY, "d", "-."),
    "hf-quanto": (GREY, "8", ":"),
    "hf-hqq": (GREY, "H", ":"),
}
# Not methods: colours that no method and no state of a token has.
OTHERS = [(INK, "8", "-"), ("#8c564b", "H", "--"), ("#5b7083", "P", "-."), ("#6a51a3", "D", ":")]
LETTERS = 13  # points
SETTINGS = {
    "svg.hashsalt": "kvlab",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": LETTERS,
    "axes.titlesize": LETTERS,
    "figure.titlesize": LETTERS,
    "legend.fontsize": LETTERS,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


def style(method: str) -> tuple[str, str, str]:
    """(colour, marker, line) of a method; parameters do not matter. Names that are not kvlab's get those that
    belong to the name alone."""
    name = name_of(method)
    if name in STYLE:
        return STYLE[name]
    marker, colour = divmod(number(name), len(OTHERS))
    return OTHERS[colour][0], OTHERS[marker % len(OTHERS)][1], OTHERS[colour][2]


def number(name: str) -> int:
    """A number for a name, the same on every machine."""
    return crc32(name.encode())


def canvas(
    width: float = 7.0, height: float = 3.2, columns: int = 1, heights=(1,)
) -> tuple[Figure, list[Axes]]:
    """An empty figure of width x height inches and its axes, row by row; heights: of the rows, relative."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    return figure, list(axes.flat)


def bars(values: dict, *, x: str, limit: float, axes=None) -> Figure:
    """One horizontal bar for each name, in order from the top, its value written at its end.

    values: name -> number; a method's name brings its colour. limit: end of the axis. Returns the figure.
    """
    if axes is None:
        axes = canvas(7.2, 0.8 + 0.3 * len(values))[1][0]
    with matplotlib.rc_context(SETTINGS):
        colours = [style(name)[0] for name in values]
        drawn = axes.barh(list(values), list(values.values()), color=colours)
        axes.bar_label(drawn, padding=3, fmt="{:g}")
        axes.invert_yaxis()
        axes.set(xlabel=x, xlim=(0, limit))
    return axes.figure


# The spans of a `measure.timeline.Timeline`: colour, hatching, and their name in the legend.
SPANS = {
    "project": (ORANGE, "", "computes"),
    "attention": (ORANGE, "", "computes"),
    "ffn": (ORANGE, "", "computes"),
    "selection": (ORANGE, "...", "chooses"),
    "stall": ("#ffffff", "xxx", "waits"),
    "prefetch": (VERMILLION, "", "fetched ahead"),
    "fetch": ("#f7b48a", "", "fetched late"),
    "write": (YELLOW, "", "to the host"),
}
LANES = {"compute": "device", "to device": "link", "to host": "back"}


def gantt(timeline, *, title: str = "") -> Figure:
    """A timeline as three lanes: computation on the device, transfers to it over the link, and transfers
    back.

    timeline: a `measure.timeline.Timeline`, for example of one step: `timeline.steps(3)`. Attention and
    transfers show the number of their layer, if there is room. Returns the figure.
    """
    if not timeline.spans:
        raise ValueError("timeline: it holds no spans")
    lanes = list(LANES) if timeline.transfers else ["compute"]
    axes = canvas(8.4, 1.3 + 0.42 * len(lanes))[1][0]
    with matplotlib.rc_context(SETTINGS | {"hatch.linewidth": 0.6}):
        unit, factor, longest = _scale([timeline])
        _spans(axes, timeline, {lane: row for row, lane in enumerate(lanes)}, factor, longest)
        axes.set(xlim=(0, longest * factor), ylim=(len(lanes) - 0.5, -0.5), xlabel=unit)
        axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes])
        _legend_of_spans(axes, {span.what for span in timeline.spans}, title)
    return axes.figure


def gantts(timelines: dict, *, title: str = "") -> Figure:
    """Timelines one below the other on one time axis: name -> `measure.timeline.Timeline`. The upper lane of
    each is the device, the lower one the transfers to it; those back to the host, one token per layer, are
    left out."""
    axes = canvas(8.4, 1.0 + 0.46 * len(timelines))[1][0]
    with matplotlib.rc_context(SETTINGS | {"hatch.linewidth": 0.6}):
        unit, factor, longest = _scale(timelines.values())
        for row, timeline in enumerate(timelines.values()):
            lanes = {"compute": row - 0.2, "to device": row + 0.2} if timeline.transfers else {"compute": row}
            _spans(axes, timeline, lanes, factor, longest, height=0.36)
        axes.set(xlim=(0, longest * factor), ylim=(len(timelines) - 0.45, -0.55), xlabel=unit)
        axes.set_yticks(range(len(timelines)), [name_of(name) for name in timelines])
        lanes = [span for line in timelines.values() for span in line.spans if span.lane != "to host"]
        _legend_of_spans(axes, {span.what for span in lanes}, title)
    return axes.figure


def _scale(timelines) -> tuple[str, float, float]:
    """(Unit, how many of it make a second, seconds of the longest one's computation)."""
    longest = max(max(s.end for s in t.compute) - min(s.start for s in t.compute) for t in timelines)
    return ("ms", 1e3, longest) if longest < 10 else ("s", 1.0, longest)


def _spans(axes: Axes, timeline, lanes: dict, factor: float, longest: float, height: float = 0.66) -> None:
    """Boxes to scale, from the start of the computation to its end; lanes: name -> its position."""
    first, last = min(s.start for s in timeline.compute), max(s.end for s in timeline.compute)
    for span in timeline.spans:
        start, end = max(span.start, first) - first, min(span.end, last) - first
        if end <= start or span.lane not in lanes:
            continue
        colour, hatch, _ = SPANS[span.what]
        row = lanes[span.lane]
        axes.barh(row, (end - start) * factor, left=start * factor, height=height, color=colour, hatch=hatch,
                  edgecolor=INK, linewidth=0.4)  # fmt: skip
        if span.what in ("attention", "prefetch", "fetch") and end - start > longest / 32:
            axes.text((start + end) / 2 * factor, row, span.layer, ha="center", va="center_baseline")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _legend_of_spans(axes: Axes, used, title: str) -> None:
    """The title, and under it one line with the meanings of the colours."""
    marks = {
        name: Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.4, label=name)
        for what, (colour, hatch, name) in SPANS.items()
        if what in used
    }
    above(axes, marks.values(), title)


def above(axes: Axes, handles, title: str = "") -> None:
    """A legend above the axes, at most five names a line and no wider than the figure; over it the title."""
    handles = list(handles)
    for columns in range(min(5, len(handles)), 0, -1):
        legend = axes.legend(
            handles=handles, title=title or None, loc="lower left", bbox_to_anchor=(-0.01, 0.99),
            frameon=False, ncols=columns, alignment="left", borderpad=0.1, borderaxespad=0, handlelength=1,
            handletextpad=0.4, columnspacing=1.2,
        )  # fmt: skip
        axes.figure.draw_without_rendering()
        if legend.get_window_extent().x1 <= axes.figure.bbox.x1:
            break


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near to the wanted ones as `gap` between neighbours allows, inside [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    placed = list(wanted)
    for _ in range(200):
        for a, b in pairwise(order):
            overlap = gap - (placed[b] - placed[a])
            if overlap > 1e-9:
                placed[a] -= overlap / 2
                placed[b] += overlap / 2
        if order:
            shift = max(0.0, low - placed[order[0]]) - max(0.0, placed[order[-1]] - high)
            placed = [min(max(p + shift, low), high) for p in placed]
    return placed
