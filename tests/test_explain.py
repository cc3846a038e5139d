"""`kvlab methods NAME`: every parameter of every method is explained."""

import re

import pytest

from kvlab.cli import main
from kvlab.explain import meanings
from kvlab.finding import METHODS, PROFILED

KNOWN = METHODS | PROFILED


@pytest.mark.parametrize("name", KNOWN)
def test_every_parameter_is_explained(name):
    found = meanings(KNOWN[name])
    assert [one for one in KNOWN[name].parameters if not found.get(one)] == []
    assert not [text for text in found.values() if text[-1] not in ".)"]
    told = {name: found[name] for name in KNOWN[name].parameters}
    assert not [text for text in told.values() if re.search("(?:see|as in) `[A-Z]", text)], (
        "pointers to classes"
    )
    if "budget" in told:
        assert re.search("fraction|share", told["budget"]), told["budget"]


def test_one_method_is_printed(capsys):
    assert main(["methods", "snapkv:budget=0.5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("snapkv: What the last queries") and "Li et al. 2024." in said
    assert "\nwindow=16\n    queries that vote, and that always stay.\n" in said
    assert main(["methods", "snapvk"]) == 2
    assert "did you mean snapkv" in capsys.readouterr().err
