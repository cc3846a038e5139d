"""The report as a paper wants it: LaTeX (booktabs) or Markdown beside its figures, or all of it as a PDF."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pandas
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from ..accuracy.taskset import AGREEMENT
from ..core.files import write_file
from ..core.table import markdown as pipes
from . import paper
from .plots import SETTINGS, picture
from .significance import ABOUT, matrix
from .tables import Board, headline, sides, together

FORMATS = ("html", "latex", "markdown", "pdf")
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$",
    "–": "--", "<": "$<$", ">": "$>$", "▲": r"$\blacktriangle$", "…": r"\dots{}",
}  # fmt: skip
Table = tuple[str, list[str], list[list[str]], str]  # (title, head, lines, what it is of)


def tables(found: list[Board]) -> list[Table]:
    """Accuracy and bytes of boards that share a table, then every two methods of each task."""
    made: list[Table] = []
    for group in together(found):
        rows = [row for board in group for row in board.rows if row["task"] != AGREEMENT]
        if not rows:
            continue
        title = ", ".join(filter(None, (group[0].model, group[0].setting)))
        frame, note = paper.accuracy(rows, called=str, against=group[0].against)
        body = [[name, *line] for name, *line in frame.fillna("–").itertuples()]
        what = f"Accuracy through the cache and bytes held: {title}"
        made.append((what, ["method", *frame], body, note.removesuffix(".")))
        for board, side in zip(group, sides(group), strict=True):
            for task in board.tasks:
                if pairs := matrix(board, task):
                    what = ", ".join(filter(None, (title, task, side)))
                    made.append((f"Every pair of methods: {what}", *pairs, f"{ABOUT[0].upper()}{ABOUT[1:]}"))
    return made


def write(form: str, found: list[Board], figures: list[dict], out: Path) -> Path:
    """Write report.tex, report.md or report.pdf; returns its path. LaTeX has its figures beside it as PDF."""
    return {"latex": _latex, "markdown": _markdown, "pdf": _pdf}[form](found, figures, out)


def _markdown(found: list[Board], figures: list[dict], out: Path) -> Path:
    named = lambda board: ", ".join(filter(None, (board.model, board.setting, board.protocol)))
    parts = [f"**{named(board)}.** {headline(board)}" for board in found]
    parts += [f"## {title}\n\n{pipes(head, body, f'{note}.')}" for title, head, body, note in tables(found)]
    parts += [f"![{one['title']}]({one['path'].name})\n\n{one['title']}. {one['about']}" for one in figures]
    write_file(out / "report.md", "\n\n".join(parts) + "\n")
    return out / "report.md"


def _latex(found: list[Board], figures: list[dict], out: Path) -> Path:
    parts = ["% In the preamble: \\usepackage{booktabs,graphicx,amssymb}"]
    parts += [booktabs(*one) for one in tables(found)]
    for one in figures:
        file = one["path"].with_suffix(".pdf")
        with matplotlib.rc_context(SETTINGS):
            look = {"bbox_inches": "tight", "metadata": {"CreationDate": None}}
            write_file(file, picture(one["make"](), "pdf", **look))
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
    with matplotlib.rc_context(SETTINGS), PdfPages(path, metadata={"CreationDate": None}) as pages:
        for make in makers:
            pages.savefig(make(), bbox_inches="tight", pad_inches=0.5)
    return path


def sheet(title: str, head: list[str], body: list[list[str]], note: str) -> Figure:
    """A table as a page, as wide as it needs."""
    plain = pandas.DataFrame(body, columns=range(len(head))).map(lambda text: text.replace("`", ""))
    heads = [text.replace(", ", "\n").replace(" / ", " /\n") for text in head]
    widths = [max(map(len, [*text.split("\n"), *plain[place]])) + 2 for place, text in enumerate(heads)]
    tall = 0.7 * max(text.count("\n") for text in heads) + 1.3
    width, line = max(6.0, 0.085 * sum(widths)), 0.24
    note = textwrap.fill(f"{title}. {note}.".replace("`", ""), int(width / 0.075))
    height = line * (len(body) + tall)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, sum(widths)), ylim=(height, 0))
    axes.axis("off")
    ends = [sum(widths[: place + 1]) for place in range(len(widths))]
    put = lambda x, y, text, **how: axes.text(x, y, text, fontsize=9, va="bottom", parse_math=False, **how)
    for row, (base, texts) in enumerate(
        [
            (tall * line, heads),
            *(
                ((tall + 1 + place) * line, list(texts))
                for place, texts in enumerate(plain.itertuples(index=False))
            ),
        ]
    ):
        bold = {"fontweight": "bold"} if row == 0 else {}
        put(0, base - 0.05, texts[0], ha="left", **bold)
        for end, text in zip(ends[1:], texts[1:], strict=True):
            put(end, base - 0.05, text, ha="right", **bold)
    for y, thick in ((0, 1.2), (tall * line, 0.7), (height, 1.2)):
        axes.axhline(y, color="black", lw=thick, clip_on=False)
    axes.text(0, height + 0.12, note, fontsize=9, va="top", parse_math=False)
    return figure


def captioned(one: dict) -> Figure:
    """A figure with its words below."""
    figure = one["make"]()
    words = textwrap.fill(f"{one['title']}. {one['about']}", 95)
    figure.text(0.02, -0.02, words, fontsize=9, va="top", parse_math=False)
    return figure
