"""The table of methods and the parser of specs."""

from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.finding import METHODS, PROFILED
from kvlab.methods import CHOSEN, HOST, ROUNDED, WHOLE
from kvlab.spec import parse


def test_the_table():
    assert set(kvlab.FIRST_WAVE) <= set(METHODS)
    for name, entry in METHODS.items():
        assert entry.name == name and entry.summary.endswith(".") and "\n" not in entry.summary
        assert all(not isinstance(default, type) for default in entry.parameters.values())


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


@pytest.mark.parametrize(
    "text, name, parameters",
    [
        ("full", "full", {}),
        ("h2o:budget=0.2,recent=0.5", "h2o", {"budget": 0.2, "recent": 0.5}),
        (" topk:budget=64 ", "topk", {"budget": 64}),
        ("infinigen:alpha=inf", "infinigen", {"alpha": float("inf")}),
        ("static:length=none", "static", {"length": None}),
        ("fp8:format=e5m2", "fp8", {"format": "e5m2"}),
    ],
)
def test_specs(text, name, parameters):
    spec = parse(text)
    assert (spec.name, spec.parameters, str(spec)) == (name, parameters, text.strip())
    assert parse(spec) is spec and spec.method is METHODS[name]


@pytest.mark.parametrize(
    "spec, says",
    [
        ("h20", "unknown method 'h20', did you mean h2o"),
        ("", "unknown method ''"),
        ("h2o:bugdet=0.2", "no parameter 'bugdet', did you mean budget"),
        ("full:budget=1", "no parameter 'budget'; it has: none"),
        ("h2o:budget", "expected parameter=value, got 'budget'"),
        ("h2o:budget=", "expected parameter=value"),
        ("h2o:budget=0.2,budget=0.5", "budget is given twice"),
        ("sinks:budget=1e400", "method 'sinks:budget=1e400': budget=1e400 is no number that can be used"),
        ("adakv:of=h2o:budget=0.3", "of=h2o:budget=0.3: expected a method's name without parameters"),
        ("fp8:scale=fp32", "scale='fp32': there is none without axis= or group="),
        ("sinks:sinks=true", "sinks=True: expected"),
        ("infinigen:full_layers=true", "full_layers=True: expected"),
        ("padded:quantized=3", "quantized=3: expected true or false"),
        ("topk:full_layers=99", "full_layers=99: the model has 4 layers"),
        ("h2o:budget=0", "budget=0: expected a fraction"),
        ("h2o:budget=1.5", "budget=1.5: expected a fraction"),
        ("h2o:budget=-3", "budget=-3"),
        ("h2o:budget=lots", "budget='lots'"),
        ("int8:group=3", "group=3: does not divide the head dimension 8"),
        ("int8:axis=row", "axis='row': expected one of group, token, channel, tensor"),
        ("int4:axis=token,group=4", "group=4: only with axis='group'"),
        ("int4:symmetric=2", "symmetric=2: expected true or false"),
        ("int2:scale=fp64", "scale='fp64': expected one of fp16, fp32"),
        ("int2:nonfinite=ignore", "nonfinite='ignore': expected one of refuse, clip"),
        ("int4:smooth=2", "smooth=2: expected a strength from 0 to 1"),
        ("int4:sinks=-1", "sinks=-1: expected a whole number of at least 0"),
        ("kivi2:group=0", "group=0: expected a whole number of at least 1"),
        ("kivi2:recent=half", "recent='half': expected a whole number of at least 0"),
        ("fp8:axis=row", "axis='row'"),
        ("fp8:group=3", "group=3: does not divide the head dimension 8"),
        ("static:length=0", "length=0: expected a whole number of at least 1"),
        ("topk:full_layers=-1", "full_layers=-1: expected a whole number of at least 0 layers"),
        ("infinigen:full_layers=inf", "full_layers=inf: expected a whole number of at least 0 layers"),
        ("padded:quantized=7", "quantized=7: expected true or false"),
        ("fp8:scale=5", "scale=5: expected one of fp16, fp32"),
        ("snapkv:window=true", "window=True: expected a whole number of at least 1 queries"),
        ("snapkv:kernel=4", "kernel=4: expected an odd"),
        ("pyramidkv:beta=0.5", "beta=0.5"),
        ("fp8:format=e1m1", "format='e1m1': expected one of e4m3, e5m2"),
        ("no_such_module.Keep", "No module named"),
        ("kvlab.keep.Nothing", "no attribute"),
        ("kvlab.decode.Trace", "expected a Keep, Store, format, Place or Fetch class"),
    ],
)
def test_bad_specs_say_what_is_wrong(spec, says):
    with pytest.raises(ValueError, match="(?s)" + says.replace("(", r"\(")) as error:
        kvlab.make_cache(tiny("llama"), spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "own, preset",
    [
        ("kvlab.keep.H2O:budget=0.4", "h2o:budget=0.4"),
        ("kvlab.store.Int:bits=4", "int4"),
        ("kvlab.store.Static:length=60", "static"),
        ("kvlab.place.TopK:budget=5", "topk:budget=5"),
        ("kvlab.place.Host", "full"),
    ],
)
def test_a_class_of_ones_own_by_its_path(own, preset):
    model, ids = tiny("llama"), prompt(30)
    mine, theirs = (kvlab.decode(model, ids, kvlab.make_cache(model, s), 6) for s in (own, preset))
    assert torch.equal(mine.logprobs, theirs.logprobs)


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
