"""The report's tables in the terminal; where one is too wide, its last columns follow below.

Columns of the speed table come from `tables.COLUMNS`.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .significance import ABOUT, matrix
from .tables import COLUMNS, HALF, Board, headline, sides, united, units

Columns = list[tuple[str, list]]  # (head, a text for every method)
DASHES = ["–"] * 3
STYLES = {"▲": "bold", "▼": "dim"}  # of a text with this mark
LEGEND = {  # of the columns of what it costs, by what a `Board` has
    "bytes": "Bytes: per cent of what full holds.",
    "scored_share": "By score: per cent of the slots held that the score chose, where it is least.",
    "agreement": "Top-1: per cent of predictions that are full's. KL: nats per token.",
    "speed": "Time: one row, median.",
}


def print_tables(group: list[Board], console: Console, every_two: bool = False) -> None:
    """Headlines, accuracy, and what it costs, of boards that share a table; every_two: and which two methods
    differ on a task."""
    names = sides(group)
    for board, side in zip(group, names, strict=True):
        what = ", ".join(part for part in (board.model, board.setting, side) if part)
        title = ": ".join(filter(None, (what, headline(board))))
        console.print(Text(f"\n{title}", style="bold"))
    console.print()
    for line in filter(None, (board.left_out for board in group)):
        console.print(Text(f"{line}\n"), soft_wrap=True)
    for line in filter(None, (board.protocol for board in group)):
        console.print(Text(line), soft_wrap=True)
    methods = united(board.methods for board in group)
    scored = [method for method in methods if any(method in board.scored for board in group)]
    if scored:
        _print(scored, [c for b, side in zip(group, names) for c in _scores(b, scored, side)], console)
        marks = (
            f" ▲ best, ▼ worst, * differs from {group[0].against} by more than noise, each pair by itself."
        )
        console.print(f"{units(group).capitalize()}.{marks if len(scored) > 1 else ''}")
        for board, side in zip(group, names, strict=True):
            for line in board.remarks:
                console.print(Text(f"{side}: {line}" if side else line), soft_wrap=True)
        console.print()
    for board, side in zip(group, names, strict=True) if every_two else ():
        for task in board.tasks:
            if found := matrix(board, task):
                console.print(
                    Text(f"Every pair of methods on {', '.join(filter(None, (task, side)))}", style="bold")
                )
                printed(*found, console)
                console.print(f"{ABOUT[0].upper()}{ABOUT[1:]}.\n")
    if any(board.bytes or board.speed or board.agreement for board in group):
        _print(methods, [c for b, side in zip(group, names) for c in _costs(b, methods, side)], console)
        there = [text for name, text in LEGEND.items() if any(getattr(board, name) for board in group)]
        console.print(" ".join(there))
        for line in filter(None, (board.busy for board in group)):
            console.print(Text(line), soft_wrap=True)
        if any(board.asked_again for board in group):
            console.print(
                "A context is prefilled once for all its questions; seconds are of both, a prefill that "
                "methods share counted whole for each.",
                soft_wrap=True,
            )


def _print(methods: list[str], columns: Columns, console: Console) -> None:
    heads, texts = zip(*columns, strict=True)
    printed(["method", *heads], list(zip(methods, *texts, strict=True)), console)


def _scores(board: Board, methods: list[str], side: str) -> Columns:
    columns = []
    for task in board.tasks:
        label = board.metric[task]["metric"].split(",")[0]
        label = {"exact_match": "exact", "word_perplexity": "ppl"}.get(label, label)
        texts = [_mark(board.entries.get((method, task))) for method in methods]
        columns.append((_beside(side, f"{task}\n{label}".replace("_em\n", "\n")), texts))
    return columns


def _beside(side: str, head: str) -> str:
    """A column's title, under the protocol where a table has several."""
    return side.replace("-", "-\n") + f"\n{head}" if side else head


def _mark(entry) -> str:
    if entry is None:
        return "–  "
    return f"{entry.text}{'*' if entry.differs else ' '}{'▲' if entry.best else '▼' if entry.worst else ' '}"


def _costs(board: Board, methods: list[str], side: str) -> Columns:
    columns = []
    if board.bytes:
        shares = [board.bytes.get(method) for method in methods]
        for head in ("device\nheld", "host\nheld", "moved\n/step"):
            name = f"{head.split()[0]}_bytes"
            columns.append((head, [f"{100 * share[name]:.1f}" if share else "–" for share in shares]))
    if board.scored_share:
        parts = [board.scored_share.get(method) for method in methods]
        columns.append(("by\nscore", [_by_score(part) for part in parts]))
    if again := board.asked_again:
        for place, head in enumerate(("contexts", "tokens\n/context", "s\n/context")):
            columns.append((head, [again.get(method, DASHES)[place] for method in methods]))
    columns = [(_beside(side, head), texts) for head, texts in columns]
    if board.agreement:
        rows = [board.agreement.get(method) for method in methods]
        top1 = [f"{100 * row['top1']['value']:.2f}" if row else "–" for row in rows]
        kl = [f"{row['kl']['value']:.4f}" if row else "–" for row in rows]
        columns += [("top-1\nagree", top1), ("KL\nnats", kl)]
    ends = list(dict.fromkeys(board.contexts[:1] + board.contexts[-1:]))
    for column in COLUMNS:
        for context in column.at(ends) if column.terminal else ():
            texts = [column.shown(board.timing(method, context)) for method in methods]
            columns.append((column.terminal.format(context=context), texts))
    return columns


def _by_score(part: float | None) -> str:
    """The share of the slots held that a method's score chose; marked below half."""
    return "–" if part is None else f"{100 * part:.0f}{'!' if part < HALF else ' '}"


def printed(head: list[str], body: list[list[str]], console: Console) -> None:
    """Print it: as many columns side by side as there is room for, so that nothing is cropped; the others
    follow below, beside the first one again."""
    names, *columns = zip(head, *body, strict=True)
    unlimited = console.options.update(width=10**4)
    fits = lambda some: Measurement.get(console, unlimited, drawn(some)).maximum <= console.width
    while columns:
        count = len(columns)
        while count > 1 and not fits([names, *columns[:count]]):
            count -= 1
        console.print(drawn([names, *columns[:count]]))
        columns = columns[count:]


def drawn(columns: list[tuple[str, ...]]) -> Table:
    """Columns of texts, each with its title first, the first of them words."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, (head, *_) in enumerate(columns):
        table.add_column(Text(head), justify="right" if place else "left", no_wrap=True)
    for line in zip(*(texts for _, *texts in columns), strict=True):
        table.add_row(*(Text(text, style=STYLES.get(text[-1:], "")) for text in line))
    return table
