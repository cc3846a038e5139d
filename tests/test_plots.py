"""Bars and timelines are drawn to scale, in the methods' colours."""

from __future__ import annotations

import matplotlib.colors
import pytest

from kvlab import plots
from kvlab.measure.timeline import Span, Timeline


def test_bars_take_the_methods_colours():
    bars = plots.bars({"full": 3, "h2o:budget=0.2": 1}).axes[0]
    assert [matplotlib.colors.to_hex(p.get_facecolor()).upper() for p in bars.patches] == [
        plots.style(m)[0].upper() for m in ("full", "h2o")
    ]


def test_a_timeline_is_drawn_to_scale():
    spans = [
        Span("compute", "project", 0, 0, 0.0, 0.001),
        Span("compute", "stall", 0, 0, 0.001, 0.003),
        Span("compute", "attention", 0, 0, 0.003, 0.004),
        Span("to device", "fetch", 0, 0, 0.001, 0.003, 100, 0.001),
    ]
    axes = plots.gantt(Timeline(spans)).axes[0]
    boxes = [(p.get_x(), p.get_width(), round(p.get_y() + p.get_height() / 2)) for p in axes.patches]
    assert boxes == [
        (pytest.approx(span.start * 1e3), pytest.approx(span.seconds * 1e3), span.lane != "compute")
        for span in spans
    ]
    assert [t.get_text() for t in axes.texts] == ["0", "0"]  # the layer, on attention and on the fetch
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["project", "stall", "attention", "fetch"]
    with pytest.raises(ValueError, match="timeline"):
        plots.gantt(Timeline())
    both = plots.gantts({"short": Timeline(spans[:1]), "long": Timeline(spans)}, title="two")
    assert [part.get_xlim() for part in both.axes] == [(0, pytest.approx(4))] * 2  # one scale
    assert [part.get_title(loc="left") for part in both.axes] == ["short", "long"]
    assert not [text for text in both.axes[0].texts]  # a projection carries no number
    assert [t.get_text() for t in both.legends[0].get_texts()] == ["project", "stall", "attention", "fetch"]
