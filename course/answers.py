"""A class's answers to the quiz, tabulated: right before and after, and what the wrong answers show."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvlab import plots

from .quiz import QUIZ, Question, questions

PICTURES = (".png", ".pdf", ".svg")
WHEN = ("pre", "post")
ALSO = {"before": "pre", "after": "post"}  # as the printed sheet has it


@dataclass(frozen=True)
class Line:
    """One question, tabulated.

    given, right: sheets with an answer, and with the right one, before and after. wrong: the most frequent
    wrong letter before and after, and how many gave it, or ("", 0).
    """

    question: Question
    given: tuple[int, int]
    right: tuple[int, int]
    wrong: tuple[tuple[str, int], tuple[str, int]]

    def share(self, index: int) -> float | None:
        """Part of the answers that were right, before (0) or after (1); None where nobody answered."""
        return self.right[index] / self.given[index] if self.given[index] else None


def read(path: Path, asked: list[Question]) -> list[dict[str, str]]:
    """The sheets of a CSV file, answers to `asked`; ValueError with one line that says what is wrong."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, dialect=_dialect(file), restkey="too many")
            columns = [(name or "").strip().lower() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            sheets = list(reader)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text in UTF-8; save the table as CSV in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"{path}: this is not a CSV file ({error})") from None
    known = {f"q{question.number}" for question in asked}
    if "when" not in columns or not known & set(columns):
        raise ValueError(f"{path}: the first line must name the columns: name,when,q1,...,q{len(known)}")
    if unknown := [column for column in columns if column not in {"name", "when", *known}]:
        raise ValueError(f"{path}: column {unknown[0]!r} is none of name, when, q1 to q{len(known)}")
    if len(set(columns)) < len(columns):
        raise ValueError(f"{path}: a column is there twice")
    seen = {}  # (name, when) -> line
    for number, row in enumerate(sheets, 2):
        if "too many" in row:
            raise ValueError(f"{path}, line {number}: more fields than columns")
        for column, value in row.items():
            row[column] = (value or "").strip() if column == "name" else (value or "").strip().lower()
        row["when"] = ALSO.get(row["when"], row["when"])
        if row["when"] not in WHEN:
            raise ValueError(
                f"{path}, line {number}: when is {row['when']!r}, expected pre or post (or before, after)"
            )
        for column in sorted(known & set(columns)):
            if row[column] not in {"", "a", "b", "c", "d"}:
                raise ValueError(
                    f"{path}, line {number}: {column} is {row[column]!r}, expected a, b, c, d or nothing"
                )
        who = row.get("name", ""), row["when"]
        if who[0] and who in seen:
            raise ValueError(
                f"{path}, line {number}: {who[0]} has answered {who[1]!r} already, in line {seen[who]}: "
                "delete one, or tell two people apart by their names"
            )
        seen[who] = number
    if not sheets:
        raise ValueError(f"{path}: no line with answers")
    return sheets


def read_all(path: Path, asked: list[Question]) -> list[dict[str, str]]:
    """As `read`, of a file or of every CSV file in a folder, as form.html saves them: one for each sheet."""
    if not path.is_dir():
        return read(path, asked)
    files = sorted(path.glob("*.csv"))
    if not files:
        raise ValueError(f"{path}: no file ends in .csv")
    sheets = [sheet for file in files for sheet in read(file, asked)]
    counted = Counter((sheet.get("name", ""), sheet["when"]) for sheet in sheets)
    if twice := [who for who, times in counted.items() if who[0] and times > 1]:
        raise ValueError(f"{path}: {twice[0][0]} has answered {twice[0][1]!r} in two files: delete one")
    return sheets


def _dialect(file):
    """Commas, or the semicolons or tabs of many spreadsheets: what the first line has most of."""
    first = file.readline()
    file.seek(0)
    return type("Found", (csv.excel,), {"delimiter": max(",;\t", key=first.count)})


def tabulate(sheets: list[dict[str, str]], asked: list[Question]) -> list[Line]:
    """One line for each question that the sheets have."""
    lines = []
    for question in asked:
        column = f"q{question.number}"
        if column not in sheets[0]:
            continue
        told = [Counter(s[column] for s in sheets if s["when"] == when and s[column]) for when in WHEN]
        wrong = [
            Counter({letter: n for letter, n in one.items() if letter != question.right}) for one in told
        ]
        lines.append(
            Line(
                question,
                given=(told[0].total(), told[1].total()),
                right=(told[0][question.right], told[1][question.right]),
                wrong=tuple(
                    min(one.items(), key=lambda item: (-item[1], item[0]), default=("", 0)) for one in wrong
                ),
            )
        )
    return lines


def table(lines: list[Line]) -> str:
    """The table in Markdown: right of given before and after, and the most frequent wrong answer of each."""
    rows = [
        "| question | before | after | most frequent wrong answer, and what it shows |",
        "|---|--:|--:|---|",
    ]
    for line in lines:
        counts = [f"{r} of {n}" if n else "–" for r, n in zip(line.right, line.given)]
        told = {}  # letter -> "4 before", "1 after"
        for when, (letter, times) in zip(("before", "after"), line.wrong):
            if times:
                told.setdefault(letter, []).append(f"{times} {when}")
        shows = " ".join(
            f"{letter} ({', '.join(times)}): {line.question.shows[letter]}" for letter, times in told.items()
        )
        shows = shows or "none"
        rows.append(
            f"| {line.question.number}. {line.question.title} | {counts[0]} | {counts[1]} | {shows} |"
        )
    return "\n".join(rows)


def picture(lines: list[Line]):
    """For each question a ring (right before) and a dot (right after), in per cent, with an arrow between."""
    figure, (axes,) = plots.canvas(7.5, 1.1 + 0.36 * len(lines))
    for y, line in enumerate(lines):
        shares = [line.share(0), line.share(1)]
        if None not in shares and shares[0] != shares[1]:
            axes.plot([100 * s for s in shares], [y, y], color=plots.GREY, lw=2, zorder=1)
        for index, share in enumerate(shares):
            if share is not None:
                style = {"facecolors": "white" if index == 0 else plots.BLUE, "edgecolors": plots.BLUE}
                axes.scatter(
                    100 * share, y, s=90 if index == 0 else 42, linewidths=1.6, zorder=2 + index, **style
                )
    axes.set_yticks(range(len(lines)), [f"{line.question.number}. {line.question.title}" for line in lines])
    axes.set(xlim=(-4, 104), ylim=(len(lines) - 0.4, -0.6), xlabel="right answers, per cent")
    axes.axvline(25, color=plots.INK, lw=1, ls=":")
    axes.annotate("guessing", (25, -0.55), xytext=(3, 0), textcoords="offset points", fontsize=8, va="top")
    axes.scatter([], [], s=90, facecolors="none", edgecolors=plots.BLUE, linewidths=1.6, label="before")
    axes.scatter([], [], s=42, color=plots.BLUE, label="after")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def answers(path: Path, out: Path, quiz: Path = QUIZ) -> str:
    """Write the picture of a class's CSV file to `out`; returns the table. ValueError, OSError: one line."""
    asked = questions(quiz)
    try:
        sheets = read_all(path, asked)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name the class's CSV file, or the folder of its files"
        ) from None
    lines = tabulate(sheets, asked)
    figure = picture(lines)
    if out.suffix.lower() not in PICTURES:
        raise ValueError(f"{out}: a picture's name ends in one of {', '.join(PICTURES)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}): choose another --out") from None
    return table(lines)


if __name__ == "__main__":
    raise SystemExit("the command is `python -m course answers class.csv`")
