"""The table of methods and the parser of specs."""

from pathlib import Path

import pytest
from tiny import prompt, tiny

import kvlab
from kvlab.finding import METHODS, PROFILED
from kvlab.methods import CHOSEN, HOST, ROUNDED, WHOLE


@pytest.mark.parametrize("name", PROFILED)
def test_a_method_that_wants_a_profile_says_in_one_line_what_makes_one(name):
    for given in ("", ":profile=none", ":profile=1"):
        with pytest.raises(ValueError, match=rf"profile=.*; python -m course\.recipes\.{name} makes one$"):
            kvlab.make_cache(tiny("llama"), name + given)
    assert f"python -m course.recipes.{name}" in PROFILED[name].summary and name not in METHODS


def test_every_method_has_a_family_and_its_paper_stands_among_the_sources():
    sources = (Path(__file__).parents[1] / "docs" / "sources.md").read_text(encoding="utf-8")
    for entry in (METHODS | PROFILED).values():
        assert entry.family in (WHOLE, ROUNDED, CHOSEN, HOST), entry.name
        for paper in filter(None, entry.paper.split(", ")):
            assert f"| {paper} |" in sources, entry.name


def test_a_registered_method_of_ones_own():
    @kvlab.method("half")
    def half(part=0.5):
        """Half of everything."""
        return {"keep": kvlab.keep.Sinks(part, 0)}

    try:
        cache = kvlab.make_cache(tiny("llama"), "half:part=0.25")
        kvlab.decode(tiny("llama"), prompt(40), cache, 2)
        assert cache.stats().tokens_held == 10
        assert METHODS["half"].summary == "Half of everything."
    finally:
        del METHODS["half"]


class More(kvlab.keep.Keep):
    def __init__(self, budget=0.5, *given, **more):
        super().__init__(budget, *given, **more)

    def score(self, layer):
        return layer.slot_positions.float()


class Bits(kvlab.store.Int):
    def __init__(self, bits=8, **more):
        super().__init__(bits, **more)


@pytest.mark.parametrize("spec", ["More:budget=0.25", "Bits:bits=4", "More"])
def test_a_class_of_ones_own_may_take_any_parameters(spec):
    kvlab.decode(tiny("llama"), prompt(40), kvlab.make_cache(tiny("llama"), f"{__name__}.{spec}"), 2)


@pytest.mark.parametrize("name", ["../x", ".a", "a..b", "a."])
def test_what_names_no_class_is_one_line(name):
    with pytest.raises(ValueError, match=r"expected a name, or module\.Class$"):
        kvlab.make_cache(tiny("llama"), name)
