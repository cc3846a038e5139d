"""How methods are drawn in a report: one colour and one mark for each, in any set."""

from __future__ import annotations

import random
from itertools import pairwise

import matplotlib.colors
import pytest

from eval.report.budgets import curves
from eval.report.plots import looks
from kvlab.plots import STYLE

MINE = [f"mine.Keep{letter}:budget=0.2" for letter in "ABCDEF"]


def seen(look: dict) -> tuple:
    return look["color"], look["marker"], look["fillstyle"]


def test_no_two_methods_are_drawn_alike():
    """All named ones, several of one's own, and several specs of one name."""
    found = looks([*STYLE, *MINE, "h2o:recent=0.9", "h2o:recent=0.1", "sinks:sinks=8"])
    assert len({seen(look) for look in found.values()}) == len(found)
    names = {name: (found[name]["color"], found[name]["marker"]) for name in STYLE}
    assert len(set(names.values())) == len(names)  # two that share a colour differ in their mark
    assert names["keydiff"][0] != names["kvzip"][0]


@pytest.mark.parametrize("seed", range(10))
def test_a_method_looks_the_same_in_every_set(seed):
    whole = looks(STYLE)
    some = random.Random(seed).sample(sorted(STYLE), 7)
    assert {name: seen(look) for name, look in looks(some).items()} == {n: seen(whole[n]) for n in some}


def test_shades_are_told_apart():
    """Those of one family differ by a fifth of the way from black to white, and none is white."""
    by_family: dict[str, set] = {}
    for name, look in looks(STYLE).items():
        by_family.setdefault(STYLE[name][0], set()).add(look["color"])
    for shades in by_family.values():
        light = sorted(sum(matplotlib.colors.to_rgb(one)) / 3 for one in shades)
        assert all(b - a > 0.1 for a, b in pairwise(light)) and light[-1] < 0.9


def test_the_picture_of_budgets_draws_them_so():
    shared = {"task": "recall", "stderr": 0.1, "chance": 0.1, "compared": True}
    shared |= {f"{name}_bytes_of_full": 0.2 for name in ("device", "host", "moved")}
    rows = [
        shared | {"curve": curve, "method": f"{curve}:budget={budget}", "budget": budget, "value": budget}
        for curve in ("keydiff", "kvzip")
        for budget in (0.1, 0.2)
    ]
    drawn = [one.lines[0] for one in curves(rows).axes[0].containers]
    expected = looks(["keydiff", "kvzip"]).values()
    assert [(one.get_color(), one.get_marker()) for one in drawn] == [
        (o["color"], o["marker"]) for o in expected
    ]
