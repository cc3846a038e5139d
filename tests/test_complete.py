"""Nothing is forgotten: every method and every policy stands in each list that must have it."""

import json
import re
from pathlib import Path

import families.profiles
import pytest
from tiny import ELSEWHERE, SETTINGS, policies, rounds

from kvlab import place, plots
from kvlab.finding import METHODS, PROFILED

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\| (`.*?) \|", re.MULTILINE)  # the first column of a table of names


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_in_every_list(name):
    readme = set(re.findall(r"`([^`]+)`", " ".join(TABLE.findall(text("README.md")))))
    defined = "".join(
        text(f"tests/reference/test_{room}.py") for room in ("keep", "store", "place", "models")
    )
    missing = []
    if name not in SETTINGS and name not in ELSEWHERE:
        missing.append("SETTINGS in tests/tiny.py")
    if name not in readme:
        missing.append("the table of README.md")
    techniques = json.loads(text("kvlab/bill/flags.json"))["techniques"]
    if not any(name in technique["methods"] for technique in techniques):
        missing.append("kvlab/bill/flags.json")
    if name not in plots.STYLE:
        missing.append("STYLE in kvlab/plots.py")
    if not re.search(rf'"{re.escape(name)}[:,"]', defined):
        missing.append("the comparisons in tests/reference (with a definition in kvlab/reference)")
    assert not missing, f"{name} is missing in {'; '.join(missing)}"


@pytest.mark.parametrize("name", PROFILED)
def test_a_method_that_wants_a_profile_is_in_the_lists_of_people(name):
    """Those of code go through every method with its defaults, for which it has none."""
    assert f"| `{name}` |" in text("README.md") and name in plots.STYLE
    assert (ROOT / f"tests/keep/test_{name}.py").is_file() and (ROOT / f"course/recipes/{name}.py").is_file()
    assert f"def {name}(" in text("kvlab/reference/keep.py") and name in families.profiles.SETTINGS


@pytest.mark.parametrize("name", SETTINGS)
def test_what_keeps_or_fetches_has_both_settings(name):
    assert name in METHODS, f"{name}: in tests/tiny.py, not in kvlab.METHODS"
    neutral, lossy = SETTINGS[name]
    assert all(spec.partition(":")[0] == name for spec in (*neutral, *lossy))
    assert neutral or lossy, f"{name}: SETTINGS in tests/tiny.py has no setting of it"
    fetch = getattr(policies(name).get("place"), "fetch", None)
    chooses = fetch is not None and type(fetch) not in (place.Whole, place.OnDemand)
    if ("keep" in policies(name) and policies(name)["keep"].evicts) or chooses:
        missing = "one that equals the full cache" if not neutral else "one that gives something up"
        neutral = neutral or rounds(name)  # what rounds never equals it: its definition says what it holds
        assert neutral and lossy, f"{name}: SETTINGS in tests/tiny.py lacks {missing}"
