"""Bars and timelines are drawn to scale, in the methods' colours."""

from kvlab import plots


def test_no_two_methods_look_the_same():
    looks = {name: style[:2] for name, style in plots.STYLE.items()}
    assert not [name for name in looks if [*looks.values()].count(looks[name]) > 1]
