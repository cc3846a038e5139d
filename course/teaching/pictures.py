"""The pictures of the course: the life of a cache, matrices, curves, and the sentence under each of them.

They speak the visual language of `kvlab.plots`. Every state of a token also has a mark of its own, so that a
picture can be read in grey.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import urlencode

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image
from torch import Tensor

from kvlab.arithmetic import kv_bytes_per_token, padded_buffer_bytes, padded_copied_bytes
from kvlab.plots import (
    BLUE,
    GRID,
    INK,
    LETTERS,
    ORANGE,
    OTHERS,
    SETTINGS,
    SKY,
    STYLE,
    VERMILLION,
    YELLOW,
    above,
    canvas,
    spread,
    style,
)  # fmt: skip
from kvlab.spec import name_of, parse

from ..harness import CLONE


@dataclass(frozen=True)
class State:
    """What has become of one token at one step: a name, a colour and a mark that is readable in grey."""

    name: str
    colour: str
    mark: str


# A cell of a cache picture is an index into STATES.
NOTHING, KEPT, QUANTIZED, HOST, FETCHED, EVICTED, COMPUTED = range(7)
STATES = (
    State("not there yet", "#ffffff", ""),
    State("kept", BLUE, ""),
    State("quantized", SKY, "q"),
    State("on host", YELLOW, "h"),
    State("fetched", VERMILLION, "f"),
    State("evicted", GRID, "×"),
    State("computed now", ORANGE, "c"),
)


def cache_picture(states, *, title: str = "", tokens=None) -> Figure:
    """The life of a cache: one row for each step, one column for each token, coloured by `STATES`.

    states: `[steps, tokens]` integers, indices into `STATES`. tokens: labels under the columns, at most 40
    of which are written. Returns the figure.
    Raises ValueError for another number of dimensions or a state that does not exist.
    """
    grid = _grid(states)
    steps, slots = grid.shape
    small = slots <= 40 and steps <= 24  # large enough cells for marks and labels
    labels = (
        [str(token).replace("\n", "⏎").strip() for token in tokens] if tokens is not None and small else []
    )
    rows = 0.21 if small else 0.06
    axes = canvas(8.4, 0.75 + rows * steps + (0.15 + 0.1 * max(map(len, labels)) if labels else 0.45))[1][0]
    with matplotlib.rc_context(SETTINGS):
        _draw(axes, grid, small)
        if small:
            axes.set_yticks([row + 0.5 for row in range(steps)], range(steps))
        if labels:
            axes.set_xticks([column + 0.5 for column in range(len(labels))], labels, rotation=90)
        axes.set(xlabel="" if labels else "token", ylabel="step")
        above(axes, _legend(grid), title)
    return axes.figure


def cache_pictures(lives: dict, *, x: str) -> Figure:
    """The lives of caches side by side: name -> states, as in `cache_picture`; x: what a column is."""
    grids = {name: _grid(states) for name, states in lives.items()}
    steps = max(len(grid) for grid in grids.values())
    figure, axes = canvas(8.4, 1.35 + 0.15 * steps, columns=len(grids))
    with matplotlib.rc_context(SETTINGS):
        for one, (name, grid) in zip(axes, grids.items(), strict=True):
            _draw(one, grid, False)
            one.set_title(name)
            one.set_xlabel(x)
            for axis in (one.xaxis, one.yaxis):
                axis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        axes[0].set_ylabel("step")
        marks = _legend(torch.cat([grid.flatten() for grid in grids.values()]), marked=False)
        figure.legend(
            handles=marks, loc="outside upper left", frameon=False, ncols=len(marks), handlelength=1
        )
    return figure


def _grid(states) -> Tensor:
    grid = torch.as_tensor(states).long().cpu()
    if grid.dim() != 2 or grid.numel() == 0:
        raise ValueError(f"states has shape {tuple(grid.shape)}: expected [steps, tokens], not empty")
    low, high = int(grid.min()), int(grid.max())
    if low < 0 or high >= len(STATES):
        raise ValueError(f"states holds {low}..{high}: expected 0..{len(STATES) - 1}")
    return grid


def _draw(axes: Axes, grid: Tensor, marked: bool) -> None:
    """The cells; marked: large enough for lines between them, and for the marks of their states."""
    colours = ListedColormap([state.colour for state in STATES])
    line = {"edgecolors": "white", "linewidth": 0.8} if marked else {}
    axes.pcolormesh(grid.numpy(), cmap=colours, vmin=-0.5, vmax=len(STATES) - 0.5, rasterized=True, **line)
    axes.invert_yaxis()
    for row, states in enumerate(grid.tolist() if marked else []):
        for column, state in enumerate(states):
            if STATES[state].mark:
                axes.text(column + 0.5, row + 0.5, STATES[state].mark, ha="center", va="center_baseline")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _legend(grid: Tensor, marked: bool = True) -> list[Patch]:
    """What the colours of a picture mean."""
    used = [STATES[i] for i in sorted(set(grid.flatten().tolist())) if i != NOTHING]
    names = [f"{state.name} ({state.mark})" if marked and state.mark else state.name for state in used]
    return [Patch(facecolor=s.colour, edgecolor=INK, linewidth=0.5, label=n) for s, n in zip(used, names)]


def heat_map(
    values, *, title: str = "", x: str = "", y: str = "", colour: str = "", names=None, axes=None, **limits
):
    """A matrix `[rows, columns]` as colours from dark (low) to light (high), with a scale named `colour`.

    names: what the rows and the columns are called; their values are then written, too. limits: vmin, vmax of
    the scale. The colour map (cividis) is even in grey and for colour-blind readers.
    Returns the figure.
    """
    matrix = torch.as_tensor(values).detach().float().cpu()
    if matrix.dim() != 2:
        raise ValueError(f"values has shape {tuple(matrix.shape)}: expected [rows, columns]")
    if axes is None:
        axes = canvas(7.2, 3.2)[1][0]
    with matplotlib.rc_context(SETTINGS):
        image = axes.imshow(matrix.numpy(), cmap="cividis", aspect="auto", interpolation="nearest", **limits)
        axes.figure.colorbar(image, ax=axes, label=colour, shrink=0.9)
        axes.set(xlabel=x, ylabel=y, title=title)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
        for axis, called in zip((axes.yaxis, axes.xaxis), names or ()):
            axis.set_ticks(range(len(called)), called)
        for (row, column), value in np.ndenumerate(matrix.numpy()) if names else ():
            seen = "black" if image.norm(value) > 0.5 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=seen)
    return axes.figure


def lines(xs, series: dict, *, title: str = "", x: str = "", y: str = "", log: str = "") -> Figure:
    """Curves over the same `xs`, each named at its end; log: "x", "y" or "xy" for such axes.

    series: name -> values, as many as xs. A method's name brings its colour and marker with it, other names
    get the next ones.
    Returns the figure.
    """
    axes = canvas(8.0, 3.2)[1][0]
    with matplotlib.rc_context(SETTINGS):
        for index, (name, values) in enumerate(series.items()):
            known = name_of(name) in STYLE
            colour, marker, line = style(name) if known else OTHERS[index % len(OTHERS)]
            few = marker if len(xs) <= 40 else ""  # where there are many, they would hide the line
            axes.plot(xs, values, color=colour, marker=few, ls=line, ms=6, mec=INK, mew=0.5, label=name)
        if "x" in log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if "y" in log:
            axes.set_yscale("log")
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.set(xlabel=x, ylabel=y, title=title)
        if len(series) > 1:
            _name_at_the_end(axes)
    return axes.figure


def _name_at_the_end(axes: Axes) -> None:
    """Write every curve's name behind its last point, none over another."""
    axes.autoscale_view()  # limits are known only when they are asked for
    inside = axes.transData - axes.transAxes
    ends = [float(inside.transform(curve.get_xydata()[-1])[1]) for curve in axes.lines]
    gap = 1.3 * LETTERS / 72 / (0.72 * axes.figure.get_figheight())  # of the height of the axes
    for curve, end, place in zip(axes.lines, ends, spread(ends, gap, 0.0, 1.0), strict=True):
        colour = curve.get_color()
        line = {"arrowstyle": "-", "lw": 2, "color": colour, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        axes.annotate(
            curve.get_label(), (1.0, end), (1.04, place), xycoords="axes fraction", arrowprops=line,
            va="center", annotation_clip=False,
        )  # fmt: skip


def buffers(shape, length: int, *, bits: float = 16, extras=None, title: str = "", axes=None) -> Figure:
    """Memory reserved against bytes copied per 1,000 tokens, for the policies of padded static buffers.

    shape: a `models.ModelShape`; length: S; extras: spare rows as parts of S - 1 (default: 0 to 2). One curve
    for an allocation per head (QC AI Research, n.d.), one for heads that share one. Returns the figure.
    """
    extras = (
        [0, *(2.0**k for k in range(-11, -3)), *(k / 8 for k in range(1, 17))] if extras is None else extras
    )
    axes = canvas(8.8, 3.4)[1][0] if axes is None else axes
    rows, heads = length - 1, shape.kv_heads

    def at(extra: float, shared: int) -> tuple[float, float]:  # GB reserved, GB copied per 1,000 tokens
        period = int(extra * rows + 1e-9) + 1  # appends until a copy
        copied = padded_copied_bytes(shape, length, period, extra, bits, shared) / period * 1e3
        return padded_buffer_bytes(shape, length, 1 + extra / shared, bits) / 1e9, copied / 1e9

    named = (("shift", 0, "o"), ("compromise 0.5", 0.5, "D"), ("double", 1, "s"))
    with matplotlib.rc_context(SETTINGS):
        for name, shared, colour, line in (
            ("an allocation per head", 1, BLUE, "-"),
            (f"{heads} heads share one", heads, INK, "--"),
        ):
            xs, ys = zip(*(at(extra, shared) for extra in extras), strict=True)
            axes.plot(xs, ys, color=colour, ls=line, label=f"compromise, {name}")
            for policy, extra, marker in named:
                x, y = at(extra, shared)
                label = policy if shared == 1 else None
                axes.plot(x, y, marker, color=colour, ms=7, mec=INK, mew=0.5, label=label)
        ring = kv_bytes_per_token(shape, bits) * 1e3 / 1e9  # one row per token, once it is full
        x = padded_buffer_bytes(shape, length, 1, bits) / 1e9
        axes.plot(x, ring, "*", color=OTHERS[1][0], ms=10, mec=INK, mew=0.5, label="ring (takes an index)")
        axes.set_yscale("log")
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.set(xlabel="GB reserved", ylabel="GB copied per 1,000 tokens", title=title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return axes.figure


def show(figure: Figure, sentence: str) -> None:
    """Show a figure in a notebook with the sentence that says what it shows, also as its alternative text.

    The sentence is computed from the data by the caller and printed under the figure; without a notebook it
    is only printed. Raises ValueError for an empty sentence.
    """
    if not sentence.strip():
        raise ValueError("sentence is empty: say what the figure shows")
    sentence = " ".join(sentence.split())
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None
    if get_ipython() is not None:
        width, height = (round(inches * 100) for inches in figure.get_size_inches())
        data = {"image/png": _png(figure), "text/plain": f"Figure: {sentence}"}
        size = {"alt": sentence, "width": width, "height": height, "letters": letters(figure)}
        display(data, raw=True, metadata={"image/png": size})
    print(sentence)


def page(method: str = "full", *, height: int = 640, **choices) -> None:
    """Show the live page in a notebook, with a method and other choices made, and a link to it below.

    method: as "h2o:budget=0.2", one that the page has. height: pixels. choices: what else an address of the
    page may name (state.js), such as question="the brown dog" or protocol="question-inside".
    Raises ValueError for a method or a parameter that the page does not have.
    """
    from IPython.display import display

    from ..page import build

    spec = parse(method)
    percent = round(100 * spec.parameters.get("budget", 1), 6)
    if spec.name not in build.SHOWN or set(spec.parameters) - {"budget"} or percent not in range(5, 105, 5):
        raise ValueError(
            f"{method}: the live page has {', '.join(build.SHOWN)}, and a budget in steps of 0.05 up to 1"
        )
    if CLONE and not build.BUILT.exists():
        build.built()
    if "budget" in spec.parameters:
        choices = {"budget": int(percent), **choices}
    in_kit = Path("../page.html").exists() and not Path("page.html").exists()
    address = f"{'../' * in_kit}page.html#{urlencode({'method': spec.name, **choices})}"
    told, to = f"The live page with {method}", escape(address)
    display({
        "text/html": f'<iframe src="{to}" title="{told}" width="100%" height="{height}" loading="lazy">'
        f'</iframe><p><a href="{to}" target="_blank">{told}, on a page of its own</a></p>',
        "text/plain": f"{told}: {address}",
    }, raw=True)  # fmt: skip


def letters(figure: Figure) -> float:
    """How high the smallest letters of a figure are, in pixels, where it is shown in its own size."""
    written = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return round(min(text.get_fontsize() for text in written) / 72 * 100, 1)


def _png(figure: Figure) -> bytes:
    """A PNG of at most 40 colours, less than half the size: notebooks are to stay small. They are those that
    lie farthest apart, so that a method's only marker keeps its own."""
    full, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(full, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    image = Image.open(full).convert("RGB").quantize(40, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()
