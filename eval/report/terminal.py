"""The report's tables in the terminal; where one is too wide, its last columns follow below.

Columns of the speed table come from `tables.COLUMNS`.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

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
        _print([method for method in board.methods if method in board.scored], _scores(board), console)
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


def _scores(board: Board) -> Columns:
    columns = []
    for task in board.tasks:
        label = board.metric[task]["metric"].split(",")[0]
        label = {"exact_match": "exact", "word_perplexity": "ppl"}.get(label, label)
        texts = [_mark(board, method, task) for method in board.methods if method in board.scored]
        columns.append((f"{task}\n{label}".replace("_em\n", "\n"), texts))
    return columns


def _mark(board: Board, method: str, task: str) -> Text:
    entry = board.entries.get((method, task))
    if entry is None:
        return Text("–  ")
    sign = "▲" if entry.best else "▼" if entry.worst else " "
    style = "bold" if entry.best else "dim" if entry.worst else ""
    return Text(f"{entry.text}{'*' if entry.differs else ' '}{sign}", style=style)


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


def _print(methods: list[str], columns: Columns, console: Console) -> None:
    """As many columns side by side as the console has room for, so that nothing is cropped."""
    unlimited = console.options.update(width=10**4)

    def fits(some: Columns) -> bool:
        return Measurement.get(console, unlimited, _table(methods, some)).maximum <= console.width

    while columns:
        count = len(columns)
        while count > 1 and not fits(columns[:count]):
            count -= 1
        console.print(_table(methods, columns[:count]))
        columns = columns[count:]


def _table(methods: list[str], columns: Columns) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for head, _ in columns:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for method, *texts in zip(methods, *(texts for _, texts in columns), strict=True):
        table.add_row(Text(method), *texts)
    return table
