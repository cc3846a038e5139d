"""Errors to look at: a page of documents, with every method's answer and the evidence it still held.

OUT/answers.html begins with the documents that the reference (`full`, or `--against`) answers and another
method does not; OUT/answers.jsonl has all documents, in the same order. Both come from what `--log-samples`
kept.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..core.files import write_file
from ..core.numbers import is_share
from ..core.results import Store
from .tables import Board

SHOWN = 40  # documents of a task on the page
LOST, BOTH, WRONG, RIGHT = "lost", "both wrong", "wrong", "all right"  # in which order documents come
TITLES = {
    LOST: "Right under {base}, wrong under another method",
    BOTH: "Not answered by {base}",
    WRONG: "Wrong under a method, and not asked under {base}",
    RIGHT: "Answered by every method",
}


def documents(board: Board, store: Store) -> list[dict]:
    """The documents of a board's tasks with answers, those that a method lost first, and of these those that
    most methods lost."""
    found = []
    for task in board.tasks:
        if is_share(board.metric[task]):
            found += _of_task(board, task, store)
    order = [*board.tasks, *TITLES]
    return sorted(found, key=lambda one: (order.index(one["task"]), order.index(one["kind"]), -one["lost"]))


def _of_task(board: Board, task: str, store: Store) -> list[dict]:
    asked: dict[int, dict] = {}
    cells = {cell["method"]: cell for cell in board.cells if cell["task"] == task}
    for cell in (cells[method] for method in board.methods if method in cells):
        for line in store.samples(cell):
            one = asked.setdefault(line["doc_id"], {
                "model": board.model, "setting": board.setting, "protocol": cell["config"].get("protocol"),
                "task": task, **{key: line[key] for key in ("doc_id", "question", "gold")},
                **({"prompt": line["prompt"]} if "prompt" in line else {}), "answers": {},
            })  # fmt: skip
            kept = {key: line[key] for key in ("answer", "right", "choices", "evidence") if key in line}
            one["answers"][cell["method"]] = kept
    for one in asked.values():
        values = {method: float(told["right"] or 0) for method, told in one["answers"].items()}
        base = values.get(board.against)
        one["lost"] = 0 if base is None else sum(value < base for value in values.values())
        wrong = WRONG if base is None else LOST if one["lost"] else BOTH
        one["kind"] = RIGHT if min(values.values()) >= 1 else wrong
    return list(asked.values())


def write(found: list[Board], store: Store, environment) -> tuple[Path, int] | None:
    """Write the page and the lines; returns (the page's path, how many documents a method lost), or None
    where no answers were kept. environment: jinja2's."""
    told = [(board, some) for board in found if (some := documents(board, store))]
    if not told:
        return None
    every = [one for _, some in told for one in some]
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in every)
    write_file(store.out / "answers.jsonl", lines)
    sections = [
        (board, task, kind, TITLES[kind].format(base=board.against), mine)
        for board, some in told
        for task in board.tasks
        for kind in TITLES
        if (mine := [one for one in some if (one["task"], one["kind"]) == (task, kind)])
    ]
    page = environment.get_template("answers.html.j2").render(
        sections=sections, shown=SHOWN, first=LOST, split=split, held=held
    )
    write_file(store.out / "answers.html", page)
    return store.out / "answers.html", len(
        {(one["task"], one["doc_id"]) for one in every if one["kind"] == LOST}
    )


def split(one: dict) -> tuple[list[tuple[str, dict]], list[tuple[str, dict]]]:
    """A document's (method, answer) that are not right, and those that are."""
    wrong = [pair for pair in one["answers"].items() if float(pair[1]["right"] or 0) < 1]
    return wrong, [pair for pair in one["answers"].items() if pair not in wrong]


def held(told: dict) -> float | None:
    """The share of the evidence that was still held, over its tokens; None where it is not known."""
    shares = [share for sentence in told.get("evidence", ()) for share in sentence["held"]]
    return sum(shares) / len(shares) if shares else None
