"""Bars and timelines are drawn to scale, in the methods' colours."""

from __future__ import annotations

from kvlab import plots


def test_no_two_methods_look_the_same():
    looks = [(colour, marker) for colour, marker, _ in plots.STYLE.values()]
    assert len(set(looks)) == len(looks)
