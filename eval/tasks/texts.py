"""Data of the tasks `cloze` and `prose`, read beside this file: no network, any working directory."""

import json
from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def cloze(**kwargs) -> datasets.DatasetDict:
    """Rows {id, context, choices, label}: which of the words continues the story?"""
    lines = (DATA / "cloze.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def prose(**kwargs) -> datasets.DatasetDict:
    """Rows {id, text}: one original story each, in the order of the file names."""
    files = sorted((DATA / "prose").glob("*.txt"))
    rows = [{"id": f.stem, "text": f.read_text(encoding="utf-8").strip()} for f in files]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})
