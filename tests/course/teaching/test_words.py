"""What real models wrote is shown as it was stored, and asked of what is there."""

from __future__ import annotations

from types import SimpleNamespace

from course import words as asked
from course.teaching import lease, words


def test_the_clause_is_shown_in_the_words_that_were_stored(capsys):
    words.said("full", "sinks:budget=0.2", known=False)
    said = capsys.readouterr().out
    assert said.startswith("Question: Whom does one tell under clause 17?")
    assert "not known at compression" in said
    assert f"'{words.CITY}. " in said and "'the town hall." in said
    stored = dict((row[0], row[2]) for row in words.stored()["clause"]["rows"])
    assert stored["full"].strip().splitlines()[0] in said


def test_the_stored_rows_are_those_that_the_command_asks():
    formats, keeps = set(asked.FORMATS), set(asked.KEEPS)
    for study, shares in (("clause", asked.BUDGETS), ("code", (0.5,))):
        rows = {row[0] for row in words.stored()[study]["rows"]}
        assert rows - {"offload"} == {"full"} | formats | {f"{k}:budget={s}" for k in keeps for s in shares}
    assert words.CITY in lease.CITIES


def test_the_model_is_asked_where_it_was_fetched(monkeypatch, capsys):
    def missing(name):
        raise ValueError("smollm2 was not fetched")

    monkeypatch.setattr(words, "load", missing)
    words.asked("full", "sinks:budget=0.2")
    said = capsys.readouterr().out
    assert "'Oslo. What was planted stays, and'" in said and "then this cell asks it" in said
    monkeypatch.setattr(words, "load", lambda name: ("model", "tokenizer"))
    monkeypatch.setattr(
        words, "ask", lambda *given, **new: SimpleNamespace(text=f" {given[4]} of Oslo.\nMore")
    )
    words.asked("full", "sinks:budget=0.2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("  ")[-1].strip() == "'full of Oslo.'" and lines[-1].endswith("clauses 13 to 21)")
