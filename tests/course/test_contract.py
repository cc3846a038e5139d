"""The question of the course: its figures are the bill's, its drawings up to date, its guesses kept."""

import pytest

from course import editions, moving, strips
from course.teaching import contract


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


def test_the_drawings_are_those_that_the_code_draws(tmp_path):
    for path in [*strips.write(tmp_path), moving.write(tmp_path)]:
        assert (editions.DRAWINGS / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
