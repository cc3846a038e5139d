"""The report's tables in the terminal; where one is too wide, its last columns follow below.

Columns of the speed table come from `tables.COLUMNS`.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .table import printed
from .tables import COLUMNS, HALF, Board, headline

Columns = list[tuple[str, list]]  # (head, a text for every method)


def print_tables(board: Board, console: Console) -> None:
    """The headline, accuracy, and what it costs."""
    console.print(Text(f"\n{board.model}: {headline(board)}\n", style="bold"))
    if board.left_out:
        console.print(Text(f"{board.left_out}\n"), soft_wrap=True)
    if board.protocol:
        console.print(Text(board.protocol), soft_wrap=True)
    if board.tasks:
        methods = [method for method in board.methods if method in board.scored]
        _print(methods, _scores(board, methods), console)
        console.print(
            "Per cent right, or perplexity. ▲ best, ▼ worst, * differs from full by more than noise."
        )
        for line in board.remarks:
            console.print(Text(line), soft_wrap=True)
        console.print()
    if board.bytes or board.speed or board.agreement:
        _print(board.methods, _costs(board), console)
        console.print("Bytes: per cent of what full holds. Time: one row, median.")
        if board.asked_again:
            console.print(
                "A context is prefilled once for all its questions; seconds are of both, a prefill that "
                "methods share counted whole for each.",
                soft_wrap=True,
            )


def _print(methods: list[str], columns: Columns, console: Console) -> None:
    heads, texts = zip(*columns, strict=True)
    printed(["method", *heads], list(zip(methods, *texts, strict=True)), console)


def _scores(board: Board, methods: list[str]) -> Columns:
    columns = []
    for task in board.tasks:
        label = board.metric[task]["metric"].split(",")[0]
        label = {"exact_match": "exact", "word_perplexity": "ppl"}.get(label, label)
        texts = [_mark(board.entries.get((method, task))) for method in methods]
        columns.append((f"{task}\n{label}".replace("_em\n", "\n"), texts))
    return columns


def _mark(entry) -> str:
    if entry is None:
        return "–  "
    return f"{entry.text}{'*' if entry.differs else ' '}{'▲' if entry.best else '▼' if entry.worst else ' '}"


def _costs(board: Board) -> Columns:
    columns = []
    if board.bytes:
        shares = [board.bytes.get(method) for method in board.methods]
        for head in ("device\nheld", "host\nheld", "moved\n/step"):
            name = f"{head.split()[0]}_bytes"
            columns.append((head, [f"{100 * share[name]:.1f}" if share else "–" for share in shares]))
    if board.scored_share:
        parts = [board.scored_share.get(method) for method in board.methods]
        columns.append(("by\nscore", [_by_score(part) for part in parts]))
    if board.agreement:
        rows = [board.agreement.get(method) for method in board.methods]
        top1 = [f"{100 * row['top1']['value']:.2f}" if row else "–" for row in rows]
        kl = [f"{row['kl']['value']:.4f}" if row else "–" for row in rows]
        columns += [("top-1\nagree", top1), ("KL\nnats", kl)]
    if again := board.asked_again:
        heads = ("contexts", "tokens\n/context", "s\n/context")
        for place, head in enumerate(heads):
            columns.append((head, [again[method][place] for method in board.methods]))
    ends = list(dict.fromkeys(board.contexts[:1] + board.contexts[-1:]))
    for column in COLUMNS:
        for context in column.at(ends) if column.terminal else ():
            texts = [column.shown(board.timing(method, context)) for method in board.methods]
            columns.append((column.terminal.format(context=context), texts))
    return columns


def _by_score(part: float | None) -> str:
    """The share of the slots held that a method's score chose; marked below half."""
    return "–" if part is None else f"{100 * part:.0f}{'!' if part < HALF else ' '}"
