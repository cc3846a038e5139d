"""Nothing is forgotten: every method says of itself what lists, tests and pictures ask of it."""

import json
import re
from pathlib import Path

import families.profiles
import listed
import pytest
from tiny import ELSEWHERE, policies, rounds

from kvlab import place, plots
from kvlab.bill.show import elsewhere
from kvlab.finding import METHODS, PROFILED

ROOT = Path(__file__).parents[1]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_no_option_of_an_engine_stands_for_two_formats():
    """A verdict on the one would be printed beside the other."""
    for engine in (known := json.loads(text("kvlab/bill/flags.json")))["engines"]:
        there = [one["options"][engine] for one in known["techniques"] if one["options"][engine]]
        assert len({one["option"] for one in there}) == len(there), engine


def test_a_budget_hides_no_option_and_what_no_table_has_is_said():
    said = elsewhere(["sinks:budget=0.5", "kvzip:budget=0.5", "int4:axis=channel"])
    assert "--keep 4" in said and "In none of the four: eviction by attention" in said
    assert said.endswith("Not looked for there: int4:axis=channel")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_all_of_itself(name):
    one, known = METHODS[name], json.loads(text("kvlab/bill/flags.json"))["techniques"]
    assert one.summary.endswith(".") and name in plots.STYLE
    assert one.technique in {technique["name"] for technique in known}
    files = ("keeps", "test_keep", "test_store", "test_place", "test_moved", "test_models")
    compared = "".join(text(f"tests/reference/{file}.py") for file in files)
    assert re.search(rf'"{re.escape(name)}[:,"]', compared), f"{name}: no comparison in tests/reference"


@pytest.mark.parametrize("name", METHODS)
def test_what_keeps_or_fetches_has_both_settings(name):
    one = METHODS[name]
    assert name in ELSEWHERE or one.same is not None or one.less is not None
    fetch = getattr(policies(name).get("place"), "fetch", None)
    chooses = fetch is not None and type(fetch) not in (place.Whole, place.OnDemand)
    if ("keep" in policies(name) and policies(name)["keep"].evicts) or chooses:
        assert one.less is not None, f"{name} says no setting that gives something up"
        assert one.same is not None or rounds(name), f"{name} says no setting that gives nothing up"


@pytest.mark.parametrize("name", PROFILED)
def test_a_method_that_wants_a_profile_has_its_recipe(name):
    """Tests of all methods go through every one with its defaults, for which it has none."""
    assert (ROOT / f"tests/keep/test_{name}.py").is_file() and (ROOT / f"course/recipes/{name}.py").is_file()
    assert (
        f"def {name}(" in text("tests/reference/definitions/keep.py") and name in families.profiles.SETTINGS
    )


def test_readme_and_promises_list_every_method():
    assert listed.parts()[1] == listed.table(), "python -m tests.listed writes it"
    assert listed.PROMISES.read_text(encoding="utf-8") == listed.promised()
