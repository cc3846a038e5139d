"""Data of the tasks, read beside this file: no network, any working directory."""

import json
from functools import partial
from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def _test(rows: list[dict]) -> datasets.DatasetDict:
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _lines(name: str, **_) -> datasets.DatasetDict:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return _test([json.loads(line) for line in lines if line.strip()])


recall = partial(_lines, "recall")  # which name belongs to this key? Many facts, one question
recall_many = partial(_lines, "recall_many")  # the same, four questions on each document
needle = partial(_lines, "needle")  # the same with four facts hidden in long prose
chain = partial(_lines, "chain")  # two facts must be joined: owner to animal, animal to place
cloze = partial(_lines, "cloze")  # {id, context, choices, label}: which of the words continues the story?


def prose(**kwargs) -> datasets.DatasetDict:
    """Rows {id, text}: one original story each, in the order of the file names."""
    files = sorted((DATA / "prose").glob("*.txt"))
    return _test([{"id": f.stem, "text": f.read_text(encoding="utf-8").strip()} for f in files])
