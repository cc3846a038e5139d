"""What is stored can be made again: studies, their files of rows, and the documents that stand on them."""

import pytest

from eval.accuracy.accuracy import Accuracy
from eval.command import main
from eval.reproduce import collect, studies
from eval.studies.measurements import Perplexity
from kvlab.spec import parse

from .test_stored import KEYS


@pytest.fixture()
def tiny(monkeypatch):
    """Studies that a test can wait for."""
    scored = {
        "methods": ("full", "h2o"),
        "budgets": ("0.1", "0.4"),
        "tasks": ("recall",),
        "limit": 4,
        "jobs": 0,
    }
    read = {"methods": ("full", "int2"), "chunk": 64, "limit": 2}
    parts = {
        "passages": lambda quick, rows: {
            protocol: Accuracy(protocol=protocol, **scored)
            for protocol in ("context-first", "question-inside")
        },
        "perplexity": lambda quick, rows: {"workshop": Perplexity(**read)},
    }
    few = {key: {"about": "for a test"} for key in parts}
    monkeypatch.setattr("eval.reproduce.studies.parts", lambda name, *asked: parts[name](*asked))
    for module in ("studies", "documents"):
        monkeypatch.setattr(f"eval.reproduce.{module}.STUDIES", few)
    return few


def test_a_study_is_made_once_and_every_row_says_what_it_stands_on(tiny, tmp_path, capsys):
    words = ["reproduce", "--out", str(tmp_path)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "everything is there" in capsys.readouterr().err
    rows = collect.read(tmp_path / "passages.json")
    assert [(row["protocol"], row["method"]) for row in rows] == [
        (protocol, method)
        for protocol in ("context-first", "question-inside")
        for method in ("full", "h2o:budget=0.1", "h2o:budget=0.4")
    ]
    assert all(row.keys() >= KEYS and len(row["outcomes"]) == row["n"] == 4 for row in rows)
    for row in rows:
        assert row["value"] == pytest.approx(sum(map(int, row["outcomes"])) / 4)
    assert (tmp_path / "passages-context-first.png").is_file()
    (tmp_path / "passages-context-first.png").unlink()
    for cell in tmp_path.glob("passages/*/cells/*.json"):
        cell.unlink()
    assert main([*words, "--collect"]) == 0  # what was collected is shown again, without its cells
    assert (tmp_path / "passages-context-first.png").is_file() and collect.read(
        tmp_path / "passages.json"
    ) == rows
    full, int2 = collect.read(tmp_path / "perplexity.json")
    assert full.keys() >= KEYS and full["perplexity"] < int2["perplexity"]
    assert [place["position"] for place in full["rows"]] == [32]


@pytest.mark.parametrize("quick", [True, False])
def test_every_study_names_methods_that_there_are(quick, tmp_path):
    """A slip of the pen would be found hours later."""
    rows = [f"{name}.jsonl" for name in ("piqa", "copa", "hellaswag", "lambada")]
    models = ("workshop", "workshop-opt", "smollm2")
    profiles = [f"{model}-{name}.safetensors" for model in models for name in ("duo", "kvzap")]
    for name in (*rows, "wikitext2.txt", *profiles):
        (tmp_path / name).touch()
    for name, study in studies.STUDIES.items():
        parts = studies.parts(name, quick, tmp_path)
        assert parts and study["about"]
        for measurement in parts.values():
            assert "full" in {parse(method).name for method in measurement.methods}
            assert measurement.limit is not None or not quick
