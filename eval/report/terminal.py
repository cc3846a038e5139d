"""The report's tables in the terminal; each fits 80 columns with the default tasks."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import Board, headline


def print_tables(board: Board, console: Console) -> None:
    """The headline, accuracy, and what it costs."""
    console.print(Text(f"\n{board.model}: {headline(board)}\n", style="bold"))
    if board.left_out:
        console.print(Text(f"{board.left_out}\n"), soft_wrap=True)
    if board.tasks:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method", no_wrap=True)
        for task in board.tasks:
            label = board.metric[task]["metric"].split(",")[0]
            label = {"exact_match": "exact", "word_perplexity": "ppl"}.get(label, label)
            title = Text(f"{task}\n{label}".replace("_em\n", "\n"))
            table.add_column(title, justify="right", no_wrap=True)
        for method in board.methods:
            if method in board.scored:
                table.add_row(Text(method), *(_mark(board, method, task) for task in board.tasks))
        console.print(table)
        console.print("Per cent right, or perplexity. ▲ best, ▼ worst, * differs from full (2 stderr).\n")
    if board.bytes or board.speed or board.agreement:
        console.print(_costs(board))
        console.print("Bytes: per cent of what full holds. Time: one row, median.")


def _mark(board: Board, method: str, task: str) -> Text:
    entry = board.entries.get((method, task))
    if entry is None:
        return Text("–  ")
    sign = "▲" if entry.best else "▼" if entry.worst else " "
    style = "bold" if entry.best else "dim" if entry.worst else ""
    return Text(f"{entry.text}{'*' if entry.differs else ' '}{sign}", style=style)


def _costs(board: Board) -> Table:
    contexts = list(dict.fromkeys(board.contexts[:1] + board.contexts[-1:]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    heads = ["device\nheld", "host\nheld", "moved\n/step"] if board.bytes else []
    heads += ["top-1\nagree", "KL\nnats"] if board.agreement else []
    heads += [f"ms/tok\n@{context}" for context in contexts]
    heads += ["read\nGB/s"] if contexts else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for method in board.methods:
        cells = []
        if board.bytes:
            shares = board.bytes.get(method)
            names = ("device_bytes", "host_bytes", "moved_bytes")
            cells += [f"{100 * shares[name]:.1f}" if shares else "–" for name in names]
        if board.agreement:
            row = board.agreement.get(method)
            top1, kl = (row["top1"]["value"], row["kl"]["value"]) if row else (None, None)
            cells += [f"{100 * top1:.2f}", f"{kl:.4f}"] if row else ["–", "–"]
        for context in contexts:
            row = board.timing(method, context)
            cells.append(f"{row['decode_ms']:.2f}" if row else "–")
        if contexts:
            row = board.timing(method, contexts[-1])
            cells.append(f"{row['read_gbps']:.1f}" if row else "–")
        table.add_row(Text(method), *cells)
    return table
