"""Bars and timelines are drawn to scale, in the methods' colours."""

from __future__ import annotations

import pytest

from kvlab import methods, plots
from kvlab.measure.timeline import Span, Timeline
from kvlab.place import OnDemand, Whole


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
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["computes", "waits", "fetched late"]
    with pytest.raises(ValueError, match="timeline"):
        plots.gantt(Timeline())


def test_timelines_share_one_scale_and_begin_together():
    one = [Span("compute", "project", 0, 0, 0.0, 0.001)]
    late = [
        Span("compute", "attention", 0, 0, 0.010, 0.014),
        Span("to device", "prefetch", 1, 0, 0.010, 0.012, 100, 0.010),
        Span("to host", "write", 0, 0, 0.013, 0.014, 10, 0.013),
    ]
    axes = plots.gantts({"short": Timeline(one), "long": Timeline(late)}, title="two").axes[0]
    assert axes.get_xlim() == (0, pytest.approx(4))
    assert [t.get_text() for t in axes.get_yticklabels()] == ["short", "long"]
    boxes = [(p.get_x(), p.get_width()) for p in axes.patches]  # what goes back to the host is left out
    assert boxes == [(0, pytest.approx(1)), (0, pytest.approx(4)), (0, pytest.approx(2))]
    assert [t.get_text() for t in axes.texts] == ["0", "1"]  # a projection carries no number
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["computes", "fetched ahead"]


def test_what_moves_and_what_computes_has_the_colour_of_a_tokens_state():
    """Orange, vermillion and yellow mean the same in a timeline as in the picture of a cache."""
    from course.teaching import pictures

    assert {plots.SPANS[what][0] for what in ("project", "attention", "ffn", "selection")} == {
        pictures.STATES[pictures.COMPUTED].colour
    }
    assert plots.SPANS["prefetch"][0] == pictures.STATES[pictures.FETCHED].colour
    assert plots.SPANS["write"][0] == pictures.STATES[pictures.HOST].colour


def becomes(name: str) -> int:
    """What a method does to a token, as a state of `course.teaching.pictures`."""
    from course.teaching import pictures

    if name == "recompute":
        return pictures.COMPUTED
    method = methods.METHODS[name]
    if method.family == methods.HOST:
        fetch = getattr(method.policies()["place"], "fetch", None)
        return pictures.HOST if isinstance(fetch, Whole | OnDemand) else pictures.FETCHED
    states = {methods.WHOLE: pictures.KEPT, methods.ROUNDED: pictures.QUANTIZED}
    return states.get(method.family, pictures.EVICTED)


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_colour_means_the_same_of_a_token_and_of_a_method(name):
    """A method has the colour of what it does to a token; green and purple throw tokens away."""
    from course.teaching import pictures

    state = becomes(name)
    allowed = {pictures.EVICTED: {plots.GREEN, plots.PURPLE}, pictures.HOST: {plots.OCHRE}}
    assert plots.style(name)[0] in allowed.get(state, {pictures.STATES[state].colour})


def test_no_two_methods_look_the_same():
    looks = [(colour, marker) for colour, marker, _ in plots.STYLE.values()]
    assert len(set(looks)) == len(looks)
