"""One visual language for the course and the reports: how each method looks, bars, and timelines.

Okabe-Ito colours, which colour-blind readers tell apart. Figures are made without pyplot, and the same call
draws the same figure in a notebook, on a page or in a test.
"""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .spec import name_of

INK, GRID = "#1f2328", "#c9ced6"
BLUE, SKY, GREEN, YELLOW, ORANGE, VERMILLION, PURPLE, GREY = (
    "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#7a7f87",
)  # fmt: skip

# Methods: (colour, marker, line).
STYLE = {
    "full": (BLUE, "o", "-"),
    "recompute": ("#7f7f7f", "X", ":"),
    "static": (SKY, "s", "--"),
    "padded": (ORANGE, "X", "--"),
    "paged": (SKY, "P", ":"),
    "int8": (GREEN, "^", "-"),
    "int4": (GREEN, "v", "--"),
    "int5": (GREEN, "p", "-."),
    "int2": (GREEN, "D", ":"),
    "mixed": (GREEN, "8", "-."),
    "nvfp4": ("#005f43", "s", "-"),
    "mxfp4": ("#005f43", "^", "--"),
    "turboquant": ("#005f43", "*", "-."),
    "kvquant": ("#005f43", "h", ":"),
    "kivi4": ("#5f8f00", "s", "--"),
    "kivi2": ("#5f8f00", "X", ":"),
    "fp8": ("#5f8f00", "D", "-."),
    "sinks": (ORANGE, "P", "-"),
    "h2o": (VERMILLION, "h", "-"),
    "d2o": (VERMILLION, "D", "--"),
    "topk": (PURPLE, "*", "-"),
    "infinigen": ("#9a4f96", "p", "--"),
    "infinigen+int4": ("#9a4f96", "v", ":"),
    "quest": ("#44aa99", "p", "-"),
    "quest+int8": ("#44aa99", "^", "--"),
    "shadowkv": ("#44aa99", "D", "-."),
    "snapkv": (YELLOW, "P", "--"),
    "pyramidkv": (YELLOW, "^", ":"),
    "tova": (ORANGE, "X", "-."),
    "adakv": (YELLOW, "D", "-"),
    "kvzip": ("#332288", "*", "-"),
    "keydiff": ("#882255", "v", "-"),
    "keynorm": ("#882255", "<", "--"),
    "lagkv": ("#882255", ">", "-."),
    "expected": ("#332288", "d", "-"),
    "rkv": ("#332288", "X", "--"),
    "random": (GREY, "x", ":"),
    "offload": (SKY, "o", "-"),
    "offload+int4": (SKY, "v", "--"),
    "offload+h2o": (SKY, "h", "-."),
    "uvm": ("#4d4d4d", "s", "-"),
    "uvm+h2o": ("#4d4d4d", "h", "--"),
    "hf-dynamic": (GREY, "<", "-"),
    "hf-static": (GREY, ">", "--"),
    "hf-quantized": (GREY, "d", "-."),
    "hf-quanto": (GREY, "8", ":"),
    "hf-hqq": (GREY, "H", ":"),
}
OTHERS = [(BLUE, "8", ":"), (VERMILLION, "H", ":"), (GREEN, "P", ":"), (PURPLE, "D", ":")]
SETTINGS = {
    "svg.hashsalt": "kvlab",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
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
    """(colour, marker, line) of a method; parameters do not matter, unknown names get one by name."""
    name = name_of(method)
    return STYLE.get(name) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def canvas(
    width: float = 7.0, height: float = 3.2, columns: int = 1, heights=(1,)
) -> tuple[Figure, list[Axes]]:
    """An empty figure of width x height inches and its axes, row by row; heights: of the rows, relative."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    return figure, list(axes.flat)


def bars(values: dict, *, title: str = "", x: str = "", limit: float | None = None, axes=None) -> Figure:
    """One horizontal bar for each name, in order from the top, its value written at its end.

    values: name -> number; a method's name brings its colour. limit: end of the axis. Returns the figure.
    """
    if axes is None:
        axes = canvas(6.8, 0.9 + 0.34 * len(values))[1][0]
    with matplotlib.rc_context(SETTINGS):
        drawn = axes.barh(list(values), list(values.values()), color=[style(n)[0] for n in values])
        axes.bar_label(drawn, padding=3, fmt="{:g}")
        axes.invert_yaxis()
        axes.set(xlabel=x, title=title)
        axes.set_xlim(0, limit if limit is not None else max(values.values()) * 1.12)
    return axes.figure


def tiers(machines: dict, marks: dict[str, float], *, title: str = "") -> Figure:
    """Memories by how much they hold and how fast they give it: machine -> name -> `arithmetic.Tier`, a line
    for each machine; marks: label -> bytes, a dotted line each. Returns the figure."""
    axes = canvas(7.0, 3.6)[1][0]
    looks = [(BLUE, "o", "-"), (VERMILLION, "s", "--"), (GREEN, "^", ":")]
    with matplotlib.rc_context(SETTINGS):
        for (machine, memories), (colour, marker, line) in zip(machines.items(), looks, strict=False):
            sizes, speeds = zip(*((one.size, one.bandwidth) for one in memories.values()), strict=True)
            axes.plot(sizes, speeds, color=colour, marker=marker, ls=line, lw=1, label=machine)
            for name, one in memories.items():
                axes.annotate(name, (one.size, one.bandwidth), xytext=(6, 5), textcoords="offset points",
                              fontsize=9, color=colour)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="bytes it holds", ylabel="bytes per second", title=title)
        axes.margins(x=0.15, y=0.15)
        for label, size in marks.items():
            axes.axvline(size, color=INK, lw=0.8, ls=":")
            axes.annotate(label, (size, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8,
                          xytext=(-3, 0), textcoords="offset points", ha="right", va="bottom")  # fmt: skip
        axes.grid(True)
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.14, 0.02))
    return axes.figure


def splits(weights: list[list[float]], shares: list[float], *, title: str = "") -> Figure:
    """Flash-decoding: what every split makes of its own tokens, and the same once all are put together.

    weights: per split, its softmax over its own tokens, each summing to 1; shares: the part of the whole
    softmax that lies on each split. Returns the figure.
    """
    alone, together = canvas(7.2, 3.6, heights=(1, 1))[1]
    looks = [(BLUE, ""), (ORANGE, "///"), (GREEN, "..."), (PURPLE, "xxx")]
    with matplotlib.rc_context(SETTINGS | {"hatch.linewidth": 0.6}):
        start = 0
        for number, (own, share) in enumerate(zip(weights, shares, strict=True)):
            places = range(start, start + len(own))
            colour, hatch = looks[number % len(looks)]
            drawn = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.4}
            alone.bar(places, own, **drawn)
            together.bar(places, [share * weight for weight in own], **drawn)
            middle = start + (len(own) - 1) / 2
            alone.text(middle, 1.02, "sum 1", transform=alone.get_xaxis_transform(), ha="center", fontsize=9)
            together.text(middle, 1.02, f"sum {share:.2f}", transform=together.get_xaxis_transform(),
                          ha="center", fontsize=9)  # fmt: skip
            start += len(own)
            for axes in (alone, together):
                if number < len(weights) - 1:
                    axes.axvline(start - 0.5, color=INK, lw=0.8, ls=":")
        alone.set(ylabel="weight, alone", xticks=[])
        together.set(ylabel="weight, together", xlabel="token")
        alone.figure.suptitle(title, fontsize=11)
    return alone.figure


def to_the_end(curves: dict[str, list[tuple[float, float]]], *, x: str, y: str, title: str = "") -> Figure:
    """Curves that end where something is used up: label -> points (x, y), the last of each marked with its
    numbers. Returns the figure."""
    axes = canvas(7.0, 3.4)[1][0]
    looks = [(BLUE, "o", "-"), (GREEN, "^", "--"), (VERMILLION, "s", ":")]
    with matplotlib.rc_context(SETTINGS):
        for (label, points), (colour, marker, line) in zip(curves.items(), looks, strict=False):
            places, values = zip(*points, strict=True)
            axes.plot(places, values, color=colour, ls=line, label=label)
            axes.plot(places[-1], values[-1], color=colour, marker=marker, ls="")
            axes.annotate(f"{places[-1]:,}: {values[-1]:,.0f}", (places[-1], values[-1]), xytext=(-4, 7),
                          textcoords="offset points", fontsize=9, ha="right", color=colour)  # fmt: skip
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.set_ylim(0, 1.15 * max(value for points in curves.values() for _, value in points))
        axes.grid(True)
        axes.legend(frameon=False, loc="lower right")
    return axes.figure


# What the spans of a `measure.timeline.Timeline` look like: colour and hatching.
SPANS = {
    "project": (SKY, ""),
    "selection": (PURPLE, "..."),
    "stall": ("#ffffff", "xxx"),
    "attention": (BLUE, ""),
    "ffn": (GREEN, ""),
    "prefetch": (ORANGE, ""),
    "fetch": (VERMILLION, ""),
    "write": (YELLOW, ""),
}


def gantt(timeline, *, title: str = "", axes: Axes | None = None, until: float | None = None) -> Figure:
    """A timeline as three lanes: what the device computes, what comes to it over the link, what goes back.

    timeline: a `measure.timeline.Timeline`, for example of one step: `timeline.steps(3)`. Attention carries
    the number of its layer, a transfer that of the layer it is for, where there is room. until: seconds at
    which the axis ends (default: with the computation). Returns the figure.
    """
    if not timeline.spans:
        raise ValueError("timeline: it holds no spans")
    lanes = _lanes(timeline)
    first = min(span.start for span in timeline.compute)
    last = max(span.end for span in timeline.compute)
    until = last if until is None else until
    unit, factor = ("ms", 1e3) if until - first < 10 else ("s", 1.0)
    axes = canvas(7.6, 1.3 + 0.4 * len(lanes))[1][0] if axes is None else axes
    with matplotlib.rc_context(SETTINGS | {"hatch.linewidth": 0.6}):
        for span in timeline.spans:
            start, end = max(span.start, first), min(span.end, last)
            if end <= start:
                continue
            colour, hatch = SPANS[span.what]
            row, long = lanes.index(span.lane), (end - start) * factor
            axes.barh(row, long, left=start * factor, height=0.62, color=colour, hatch=hatch, edgecolor=INK,
                      linewidth=0.4)  # fmt: skip
            if span.what in ("attention", "prefetch", "fetch") and end - start > (until - first) / 40:
                white = "white" if span.what == "attention" else INK
                axes.text((start + end) / 2 * factor, row, span.layer, color=white, ha="center", va="center",
                          fontsize=8)  # fmt: skip
        axes.set(
            xlim=(first * factor, until * factor), ylim=(len(lanes) - 0.5, -0.5), xlabel=unit, title=title
        )
        axes.set_yticks(range(len(lanes)), lanes)
        axes.spines["left"].set_visible(False)
        marks = _legend_of_spans({span.what for span in timeline.spans})
        axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    return axes.figure


def gantts(timelines: dict, *, title: str = "") -> Figure:
    """Timelines one below the other on one time axis: name -> `measure.timeline.Timeline`; one legend."""
    lanes = [1 + len(_lanes(timeline)) for timeline in timelines.values()]
    axes = canvas(7.8, 0.6 + 0.3 * sum(lanes), heights=lanes)[1]
    starts = {name: min(s.start for s in timeline.compute) for name, timeline in timelines.items()}
    longest = max(s.end - starts[name] for name, timeline in timelines.items() for s in timeline.compute)
    used = {span.what for timeline in timelines.values() for span in timeline.spans}
    for part, (name, timeline) in zip(axes, timelines.items(), strict=True):
        gantt(timeline, axes=part, until=starts[name] + longest)
        part.get_legend().remove()
        with matplotlib.rc_context(SETTINGS):
            part.set_title(name, loc="left", fontsize=10)
        if part is not axes[-1]:
            part.set_xlabel("")
            part.tick_params(labelbottom=False)
    with matplotlib.rc_context(SETTINGS):
        marks = _legend_of_spans(used)
        figure = axes[0].figure
        figure.legend(handles=marks, loc="outside right upper", frameon=False, fontsize=8.5)
        if title:
            figure.suptitle(title, fontsize=11)
    return figure


def _lanes(timeline) -> list[str]:
    return ["compute", "to device", "to host"] if timeline.transfers else ["compute"]


def _legend_of_spans(used) -> list[Patch]:
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.4, label=what)
        for what, (colour, hatch) in SPANS.items()
        if what in used
    ]
