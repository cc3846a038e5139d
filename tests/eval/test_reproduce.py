"""What is stored can be made again: studies, their files of rows, and the documents that stand on them."""

import csv
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.accuracy.accuracy import Accuracy
from eval.reproduce import collect, rehearsal, studies
from eval.studies.measurements import Perplexity
from kvlab.spec import parse

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"model", "model_digest", "data_digest", "code_digest", "method_digest", "machine", "torch", "made"}


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
    flat = list(csv.DictReader((tmp_path / "passages.csv").open(encoding="utf-8")))
    assert [(row["protocol"], row["method"]) for row in flat] == [(r["protocol"], r["method"]) for r in rows]
    assert [float(row["bytes_held"]) for row in flat] == [r["device_bytes"] + r["host_bytes"] for r in rows]
    assert (tmp_path / "passages.parquet").is_file() and (tmp_path / "perplexity.csv").is_file()
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
    assert not list((ROOT / "docs" / "results").glob("*.writing*"))


def test_rows_whose_cells_lie_elsewhere_stay(tiny, tmp_path, capsys):
    """A study that two machines made: collecting on one drops nothing of the other's."""
    words = ["reproduce", "--out", str(tmp_path), "--studies", "passages"]
    assert main(words) == 0
    file = tmp_path / "passages.json"
    before = collect.read(file)
    for cell in tmp_path.glob("passages/*/cells/*.json"):
        if '"h2o:budget=0.4"' not in cell.read_text(encoding="utf-8"):
            cell.unlink()
    capsys.readouterr()
    assert main([*words, "--collect"]) == 0
    assert "2 rows in" in (said := capsys.readouterr().err) and "beside 4 of before" in said
    named = lambda row: (row["protocol"], row["method"])
    after = collect.read(file)
    assert [*map(named, after)] == [*map(named, before)], "in the order that they had"
    for row in after:
        (same,) = [one for one in before if named(one) == named(row)]
        assert row["outcomes"] == same["outcomes"] and row["made"] == same["made"]
    assert main([*words, "--collect"]) == 0 and collect.read(file) == after, "and again"


def test_rows_that_were_asked_otherwise_go():
    row = {"model": "a", "protocol": "context-first", "task": "recall", "limit": 100}
    full, h2o = row | {"method": "full", "settings": 0}, row | {"method": "h2o", "settings": 0}
    others = lambda made, stored: collect.others(made, stored, ("model", "protocol", "task", "method"))
    assert others([full], [full, h2o]) == [h2o]
    assert others([full | {"limit": 50}], [full, h2o]) == []
    assert others([full | {"limit": 50, "task": "needle"}], [h2o]) == [h2o]
    assert others([full | {"model_digest": "f"}], [full, h2o]) == [], "another model of this name"
    assert others([full | {"num_fewshot": 5}], [full, h2o]) == [], "behind shots"
    assert others([full | {"shots": 0}], [full, h2o]) == [h2o], "which it did not know before"


def test_timed_rows_of_other_cells_stay(tmp_path):
    file, cell = tmp_path / "speed.json", ("model", "context")
    old = [{"model": "a", "context": n, "ms": ms} for n, ms in ((256, 1), (256, 2), (2048, 3))]
    collect.write(old, "about", cell, file, print)
    collect.write([{"model": "a", "context": 256, "ms": 4}], "about", cell, file, print)
    assert [(row["context"], row["ms"]) for row in collect.read(file)] == [(256, 4), (2048, 3)]


def test_nothing_is_made_when_only_collecting(tiny, tmp_path, capsys):
    assert main(["reproduce", "--collect", "--out", str(tmp_path)]) == 0
    assert "there are no cells yet" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/*/cells/*.json"))


@pytest.mark.parametrize("words, said", [
    (["--studies", "speeches"], "expected one of passages, needles, needles_budgets, needles_2k"),
    (["--rows", "nowhere"], "there is no such folder"),
])  # fmt: skip
def test_wrong_words_are_one_line(words, said, capsys):
    assert main(["reproduce", *words]) == 2
    assert said in capsys.readouterr().err


def test_rows_of_the_users_are_asked_for(tmp_path, capsys):
    assert main(["reproduce", "--studies", "perplexity", "--out", str(tmp_path)]) == 0
    assert "perplexity: left out, since it reads files of --rows FOLDER" in capsys.readouterr().err
    words = ["reproduce", "--studies", "perplexity", "--out", str(tmp_path), "--rows", str(tmp_path)]
    assert main(words) == 1
    assert f"--text {tmp_path}/wikitext2.txt: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [True, False])
def test_every_study_names_methods_that_there_are(quick, tmp_path):
    """A slip of the pen would be found hours later."""
    for name in (
        "piqa.jsonl",
        "copa.jsonl",
        "hellaswag.jsonl",
        "lambada.jsonl",
        "wikitext2.txt",
        *(f"{model}-{name}.safetensors" for model in ("workshop", "smollm2") for name in ("duo", "kvzap")),
        "workshop-opt-duo.safetensors",
    ):
        (tmp_path / name).touch()
    for name, study in studies.STUDIES.items():
        parts = studies.parts(name, quick, tmp_path)
        assert parts and study["about"]
        for measurement in parts.values():
            assert "full" in {parse(method).name for method in measurement.methods}
            assert measurement.limit is not None or not quick


def test_shares_of_a_guessed_layer():
    """Ten layers, of which two fetch everything: without alpha eight fetch what topk does."""
    of = lambda guessed: 1000 * (2 + 8 * guessed)
    moved = {"topk:budget=0.2": 2000, "infinigen:alpha=inf,ratio=1,budget=0.2": of(0.2)}
    moved |= {"infinigen:alpha=4,ratio=1,budget=0.2": of(0.07)}
    rows = [{"model": "m", "method": name, "outcomes": "1" * 60 + "0" * 36, "moved_bytes": n}
            for name, n in moved.items()]  # fmt: skip
    found = rehearsal.shares(rows)
    assert found["m", "infinigen:alpha=4,ratio=1"]["guessed"] == pytest.approx(0.07)
    assert found["m", "infinigen:alpha=4,ratio=1"]["fetched"] == pytest.approx(0.256)
    assert found["m", "topk"]["halves"] == [1.0, 0.25]


def test_two_models_are_two_pictures(tmp_path, monkeypatch):
    """No curve of a study's picture goes from one model's points to another's."""
    row = {"protocol": "question-inside", "task": "copa", "method": "full"}
    found = [row | {"model": model} for model in ("smollm2", "other-0.5b.gguf")]
    drawn = []
    monkeypatch.setattr(collect, "read", lambda file: found)
    monkeypatch.setattr(collect, "write_flat", lambda found, file: None)
    monkeypatch.setattr(collect, "drawable", lambda rows, points: rows)
    monkeypatch.setattr(collect, "curves", lambda rows: {row["model"] for row in rows})
    monkeypatch.setattr(collect, "save", lambda figure, path, kind: drawn.append((figure, path.name)))
    collect.show_flat(tmp_path / "study.json")
    assert drawn == [
        ({"smollm2"}, "study-question-inside"), ({"other-0.5b.gguf"}, "study-question-inside-other-0_5b"),
    ]  # fmt: skip
