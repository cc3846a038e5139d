"""Tables of documents: every method once, marks where they belong, nothing compared where full guesses."""

import pytest

from eval.reproduce import documents, tables

MISSING = "Not made yet: `make reproduce` makes it."
SHARES = {f"{name}_bytes_of_full": 0.2 for name in ("device", "host", "moved")}
STANDS = {"model": "m", "model_digest": "d", "dtype": "float32", "machine": "a machine", "torch": "2",
          "n": 40, "code_digest": "c", "metric": "acc", "higher_is_better": True, "chance": 0.25,
          "floor": None}  # fmt: skip


def row(protocol, method, budget, value, task="recall", **more):
    told = {"protocol": protocol, "method": method, "curve": method.partition(":")[0], "budget": budget}
    told |= {"task": task, "value": value, "stderr": 0.05, "differs": False, "compared": True}
    told |= {"scored": None, "p": 1.0}
    return STANDS | SHARES | told | more


ROWS = [
    row("context-first", "full", None, 0.9, floor=0.4),
    row("context-first", "h2o:budget=0.1", 0.1, 0.3, differs=True, scored=0.4),
    row("context-first", "h2o:budget=0.2", 0.2, 0.5, differs=True, scored=0.6),
    row("question-inside", "full", None, 0.8),
]


@pytest.fixture()
def stored(monkeypatch):
    monkeypatch.setattr(tables, "study", lambda name: ROWS if name != "nothing" else [])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_where_full_guesses_it_is_said(monkeypatch):
    monkeypatch.setattr(
        tables, "study", lambda name: [row("context-first", "full", None, 0.3, compared=False)]
    )
    assert "full does not beat guessing on recall, so no method is compared there" in tables.accuracy(
        "passages"
    )


def test_bytes_are_never_averaged_across_protocols(monkeypatch):
    held = {"device_bytes_of_full": 0.4, "host_bytes_of_full": 0.0}
    told = [*ROWS, row("question-inside", "h2o:budget=0.2", 0.2, 0.6, **held)]
    monkeypatch.setattr(tables, "study", lambda name: told)
    line = next(line for line in tables.accuracy("it").splitlines() if line.startswith("| `h2o`"))
    assert cells(line)[-2:] == ["20 % + 20 % on the host / 40 %", "20 %"]


@pytest.mark.parametrize(
    "shots, said", [((0, 0), ", 0 shots"), ((5, 5), ", 5 shots"), ((5, 0), ", 0 or 5 shots"), ((None, 5), "")]
)
def test_shots_are_said_where_every_row_knows_them(monkeypatch, shots, said):
    tasks = zip(("recall_many", "piqa"), shots, strict=True)
    told = [row("question-inside", "full", None, 0.9, task, shots=count) for task, count in tasks]
    monkeypatch.setattr(tables, "study", lambda name: told)
    assert f"float32{said}; documents: " in tables.accuracy("it").splitlines()[-1]
    assert f" questions;{said.lstrip(',')}{',' * bool(said)} recall_many; " in tables.reuse().splitlines()[-1]


def test_a_study_that_was_not_made_is_said(stored):
    assert tables.reuse("nothing") == tables.lengths("nothing") == MISSING
    for found in (tables.accuracy("nothing"), tables.curves("nothing", "recall", "context-first")):
        assert found == MISSING
    text = "a\n<!-- results: curves nothing recall x -->\nold\n<!-- end of results -->\nb"
    assert documents.filled(text).splitlines()[2] == MISSING
