"""Data: a user's own rows for a task, read before anything is computed: a bad row is named in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlab.errors import kind_and_line
from kvlab.parameters import check_file, from_json

from ..core.errors import Problem

ASKED = ("doc_to_text", "doc_to_target", "doc_to_choice")  # what of a task's YAML reads a row


def check(asked: str, file: str, about: dict, load: Callable[[str], object]) -> None:
    """Raises Problem, which begins with what was `asked`, for a file of rows that a task cannot read.

    about: the task's YAML. load: makes the task on a file, which renders its first row; it is called with one
    row of every set of fields. Fields that a prompt, a target or a choice is, by a bare name, are looked for
    as well: lm-eval would ask the name itself.
    """
    kinds: dict[frozenset, tuple[int, dict]] = {}
    for line, row in rows(asked, file):
        kinds.setdefault(frozenset(row), (line, row))
    for line, row in kinds.values():
        with TemporaryDirectory(prefix="kvlab-rows-") as folder:
            alone = Path(folder) / "row.jsonl"
            alone.write_text(json.dumps(row) + "\n", encoding="utf-8")
            lacks = missing(row, about, load, str(alone))
        if lacks:
            there = ", ".join(map(str, row)) or "none"
            raise Problem(f"{asked}: line {line}: the task needs a field {lacks!r}; the row has {there}")


def rows(asked: str, file: str) -> list[tuple[int, dict]]:
    """(line, row) of a file that has a JSON object in every line, or a list of them. Raises Problem."""
    try:
        check_file(file)
        text = Path(file).read_text(encoding="utf-8-sig")
    except ValueError as error:
        why = "this is no text in UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise Problem(f"{asked}: {why}") from error
    listed, found = text.lstrip().startswith("["), []
    for line, said in [(1, text)] if listed else enumerate(text.split("\n"), 1):
        if not said.strip():
            continue
        try:
            value = from_json(said)
            json.dumps(value, ensure_ascii=False).encode()  # an escape may be half of a character
        except ValueError as error:
            at, what = line + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
            raise Problem(
                f"{asked}: line {at}: this is no JSON ({what}); expected an object a line"
            ) from error
        for one in value if listed else [value]:
            if not isinstance(one, dict):
                raise Problem(f"{asked}: line {line}: expected a JSON object, got {str(one)[:40]!r}")
            found.append((line, one))
    if not found:
        raise Problem(f"{asked}: this file has no rows: expected a JSON object in every line")
    return found


def as_written(asked: str, file: str, target: Path) -> Path:
    """The rows as a Parquet file whose fields are what they are in JSON: `datasets` would give a column one
    type, and take a text such as 2020-01-01 for a time."""
    from datasets import Dataset, Features, Json

    found = rows(asked, file)
    names = dict.fromkeys(name for _, row in found for name in row)
    columns = {name: [row.get(name) for _, row in found] for name in names}
    table = Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, Json())))
    for (line, row), kept in zip(found, table, strict=True):
        if odd := [name for name in row if kept[name] != row[name]]:  # whole numbers of more than 64 bits
            raise Problem(f"{asked}: line {line}: {odd[0]} is read as {kept[odd[0]]!r:.40}")
    table.to_parquet(target)
    return target


def check_documents(asked: str, file: str, task) -> None:
    """Raises Problem for a row of which a task makes no prompt, no choices or no right answer, as lm-eval
    would find out when the models have answered."""
    lines, documents = [line for line, _ in rows(asked, file)], [*task.eval_docs]
    if task.config.process_docs is not None:
        lines = range(1, len(documents) + 1)
    if len(lines) != len(documents):
        raise Problem(f"{asked}: {len(lines)} rows were read as {len(documents)}")
    for line, document in zip(lines, documents, strict=True):
        try:
            why = odd(task, document)
        except Exception as error:
            why = kind_and_line(error)
        if why:
            raise Problem(f"{asked}: line {line}: {why}")


def odd(task, document: dict) -> str | None:
    """What is wrong with the parts of a document. Whatever lm-eval raises."""
    prompt, target = task.doc_to_text(document), task.doc_to_target(document)
    if not isinstance(prompt, int if task.multiple_input else str):
        return f"the prompt is {prompt!r:.40}: expected a text"
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
        return None
    choices = task.doc_to_choice(document)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        return f"the choices are {choices!r:.40}: expected a list of texts"
    for one in target if isinstance(target, list) and task.multiple_target else [target]:
        if not (one in choices if isinstance(one, str) else isinstance(one, int) and 0 <= one < len(choices)):
            return f"the right answer is {one!r:.40}: expected one of the {len(choices)} choices, from 0"
    return None


def missing(row: dict, about: dict, load: Callable[[str], object], file: str) -> str | None:
    """The field that a task asks of a file's only row in vain; None where it asks for none, or where
    something else is wrong, which shows when all are loaded."""
    from jinja2 import Environment, UndefinedError, meta

    texts = [about[name] for name in ASKED if isinstance(about.get(name), str)]
    try:
        features = getattr(load(file), "features", None) or ()
        return next((one for one in texts if one.isidentifier() and features and one not in features), None)
    except Problem as error:
        cause = error.__cause__
    if isinstance(cause, KeyError) and cause.args and isinstance(cause.args[0], str):
        return cause.args[0]
    if isinstance(cause, UndefinedError) and (name := re.search(r"'([^']+)'(?: is undefined|$)", str(cause))):
        return name[1]
    said = lambda text: sorted(meta.find_undeclared_variables(Environment().parse(text)))
    names = [one for text in texts for one in ([text] if text.isidentifier() else said(text))]
    return next((name for name in names if name not in row and "process_docs" not in about), None)
