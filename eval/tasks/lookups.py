"""Data of the tasks `recall`, `needle`, `chain` and their exact-match twins, read beside this file."""

import json
from pathlib import Path

import datasets

DATA = Path(__file__).resolve().parent / "data"


def _rows(name: str) -> datasets.DatasetDict:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return datasets.DatasetDict({"test": datasets.Dataset.from_list([json.loads(x) for x in lines])})


def recall(**kwargs) -> datasets.DatasetDict:
    """Which name belongs to this key? Many facts, one question."""
    return _rows("recall")


def needle(**kwargs) -> datasets.DatasetDict:
    """The same with four facts hidden in long prose."""
    return _rows("needle")


def chain(**kwargs) -> datasets.DatasetDict:
    """Two facts must be joined: owner to animal, animal to place."""
    return _rows("chain")
