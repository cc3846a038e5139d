"""Data of the tasks, read beside this file: no network, any working directory."""

import json
from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def _test(rows: list[dict]) -> datasets.DatasetDict:
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _lines(name: str) -> datasets.DatasetDict:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return _test([json.loads(line) for line in lines if line.strip()])


def recall(**kwargs) -> datasets.DatasetDict:
    """Which name belongs to this key? Many facts, one question."""
    return _lines("recall")


def recall_many(**kwargs) -> datasets.DatasetDict:
    """The same, four questions on each document."""
    return _lines("recall_many")


def needle(**kwargs) -> datasets.DatasetDict:
    """The same with four facts hidden in long prose."""
    return _lines("needle")


def chain(**kwargs) -> datasets.DatasetDict:
    """Two facts must be joined: owner to animal, animal to place."""
    return _lines("chain")


def cloze(**kwargs) -> datasets.DatasetDict:
    """Rows {id, context, choices, label}: which of the words continues the story?"""
    return _lines("cloze")


def prose(**kwargs) -> datasets.DatasetDict:
    """Rows {id, text}: one original story each, in the order of the file names."""
    files = sorted((DATA / "prose").glob("*.txt"))
    return _test([{"id": f.stem, "text": f.read_text(encoding="utf-8").strip()} for f in files])
