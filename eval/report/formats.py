"""The report as a paper wants it: LaTeX (booktabs) or Markdown beside its figures, or all of it as a PDF."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.table import Table as Grid

from ..accuracy.agreement import DECODED, PROMPT
from ..accuracy.taskset import AGREEMENT
from ..core.files import write_file
from . import paper
from .plots import NOBODY, SETTINGS, save
from .significance import ABOUT, matrix
from .tables import COLUMNS, Board, headline, sides, together

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$",
    "–": "--", "<": "$<$", ">": "$>$", "▲": r"$\blacktriangle$", "…": r"\dots{}",
}  # fmt: skip
Table = tuple[str, list[str], list[list[str]], str]  # (title, head, lines, what it is of)


def tables(found: list[Board]) -> list[Table]:
    """Accuracy and bytes of boards that share a table, every two methods of each task, agreement, speed."""
    made: list[Table] = []
    for group in together(found):
        rows = [row for board in group for row in board.rows if row["task"] != AGREEMENT]
        title = ", ".join(filter(None, (group[0].model, group[0].setting)))
        if rows:
            frame, note = paper.accuracy(rows, called=str, against=group[0].against)
            body = [[name, *line] for name, *line in frame.fillna("–").itertuples()]
            what = f"Accuracy through the cache and bytes held: {title}"
            made.append((what, ["method", *frame], body, note.removesuffix(".")))
        for board, side in zip(group, sides(group), strict=True):
            for task in board.tasks:
                if pairs := matrix(board, task):
                    what = ", ".join(filter(None, (title, task, side)))
                    made.append((f"Every pair of methods: {what}", *pairs, f"{ABOUT[0].upper()}{ABOUT[1:]}"))
        for board in group:
            made += [agreement(board, title)] if board.agreement else []
            made += [speed(board, title)] if board.speed else []
    return made


def agreement(board: Board, title: str) -> Table:
    body = [
        [f"`{method}`", f"{100 * row['top1']['value']:.2f}", f"{row['kl']['value']:.2g}"]
        for method, row in sorted(board.agreement.items(), key=lambda one: board.methods.index(one[0]))
    ]
    note = f"{DECODED} predictions on held-out stories after {PROMPT} tokens, each through the cache"
    return f"Agreement with the full cache: {title}", ["method", "top-1, %", "KL, nats per token"], body, note


def speed(board: Board, title: str) -> Table:
    columns = [(column, context) for column in COLUMNS for context in column.at(board.contexts)]
    head = [f"{one.head} {one.unit.format(context=context)}" for one, context in columns]
    body = [
        [f"`{method}`", *(one.shown(board.timing(method, context)) for one, context in columns)]
        for method in board.methods
        if method in board.timed
    ]
    return f"Speed: {title}", ["method", *head], body, f"One row, greedy; medians. {board.busy}".strip(". ")


def write(form: str, found: list[Board], figures: list[dict], out: Path) -> Path:
    """Write report.tex, report.md or report.pdf; returns its path. LaTeX has its figures beside it as PDF."""
    return {"latex": _latex, "markdown": _markdown, "pdf": _pdf}[form](found, figures, out)


def _markdown(found: list[Board], figures: list[dict], out: Path) -> Path:
    named = lambda board: ", ".join(filter(None, (board.model, board.setting, board.protocol)))
    parts = [f"**{named(board)}.** {headline(board)}" for board in found]
    for title, head, body, note in tables(found):
        parts.append(f"## {title}\n\n{paper.markdown(head, body, f'{note}.')}")
    parts += [f"![{one['title']}]({one['path'].name})\n\n{one['title']}. {one['about']}" for one in figures]
    write_file(out / "report.md", "\n\n".join(parts) + "\n")
    return out / "report.md"


def _latex(found: list[Board], figures: list[dict], out: Path) -> Path:
    parts = ["% In the preamble: \\usepackage{booktabs,graphicx,amssymb}"]
    parts += [booktabs(*one) for one in tables(found)]
    for one in figures:
        file = one["path"].with_suffix(".pdf")
        with matplotlib.rc_context(SETTINGS):
            save(one["make"](), file, "pdf", bbox_inches="tight")
        caption = latex(f"{one['title']}. {one['about']}")
        parts.append(
            "\\begin{figure}\n\\centering\n\\includegraphics[width=\\linewidth]{" + file.name + "}\n"
            "\\caption{" + caption + "}\n\\end{figure}"
        )
    write_file(out / "report.tex", "\n\n".join(parts) + "\n")
    return out / "report.tex"


def latex(text: str) -> str:
    """A text for LaTeX; what is between backticks is set as code."""
    escaped = "".join(LATEX.get(letter, letter) for letter in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", escaped)


def booktabs(title: str, head: list[str], body: list[list[str]], note: str) -> str:
    """A table of booktabs; a long title is broken into lines at its commas."""
    stacked = lambda text: "\\shortstack[r]{" + r"\\".join(map(latex, text.split(", "))) + "}"
    lines = [
        " & ".join([latex(head[0]), *map(stacked, head[1:])]),
        *(" & ".join(map(latex, b)) for b in body),
    ]
    return (
        "\\begin{table}\n\\centering\\small\n\\caption{" + latex(f"{title}. {note}.") + "}\n"
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        "\\begin{tabular}{l" + "r" * (len(head) - 1) + "}\n\\toprule\n"
        + lines[0] + " \\\\\n\\midrule\n" + " \\\\\n".join(lines[1:]) + " \\\\\n"
        "\\bottomrule\n\\end{tabular}}\n\\end{table}"
    )  # fmt: skip


def _pdf(found: list[Board], figures: list[dict], out: Path) -> Path:
    path = out / "report.pdf"
    makers: list[Callable[[], Figure]] = [lambda one=one: sheet(*one) for one in tables(found)]
    makers += [lambda one=one: captioned(one) for one in figures]
    with matplotlib.rc_context(SETTINGS), PdfPages(path, metadata=NOBODY["pdf"]) as pages:
        for make in makers:
            pages.savefig(make(), bbox_inches="tight", pad_inches=0.5)
    return path


def sheet(title: str, head: list[str], body: list[list[str]], note: str) -> Figure:
    """A table as a page, below its words."""
    figure = Figure(figsize=(6, 0.3))  # a page grows with what is on it
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    words = textwrap.fill(f"{title}. {note}.".replace("`", ""), 110)
    axes.set_title(words, fontsize=9, parse_math=False)
    heads = [text.replace(", ", "\n").replace(" / ", " /\n") for text in head]
    drawn = axes.add_table(Grid(axes, loc="bottom"))
    for row, line in enumerate([heads, *body]):
        height = 0.75 * (1 + max(text.count("\n") for text in line))
        for column, text in enumerate(line):
            side = "right" if column else "left"
            cell = drawn.add_cell(row, column, 1, height, text=text.replace("`", ""), loc=side)
            cell.set_text_props(fontsize=9, fontweight="normal" if row else "bold", parse_math=False)
            cell.visible_edges = {0: "BT", len(body): "B"}.get(row, "open")
    drawn.auto_set_font_size(False)
    drawn.auto_set_column_width(range(len(head)))
    return figure


def captioned(one: dict) -> Figure:
    """A figure with its words below."""
    figure = one["make"]()
    words = textwrap.fill(f"{one['title']}. {one['about']}", 95)
    figure.text(0.02, -0.02, words, fontsize=9, va="top", parse_math=False)
    return figure
