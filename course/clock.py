"""The minutes of a chapter's sections in a room, and the edition for the person in front that shows them."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass

from nbformat.v4 import new_markdown_cell

from .editions import BEGIN, END, INSTEAD, learner

WORDS, LINES = 120, 15  # words spoken and lines of code read in a minute
CELL, FIGURE, HANDS, REVIEW = 0.5, 1.0, 2.0, 2.0  # minutes: run a cell, see a figure, vote, compare answers
QUESTIONS = 1.2  # learners ask: every taught minute takes this many
VALUE, LINE = 1.0, 3.0  # minutes at a small gap for a middle learner, as instructor/room.md estimates them


@dataclass
class Section:
    """A section of a chapter.

    told: minutes to say it, run it and look at it. gaps: at its small gaps. stated: what an exercise says
    that it takes. cells: the numbers of its code cells, as Jupyter counts them. exercise: its number, or 0.
    """

    heading: str
    told: float = 0.0
    gaps: float = 0.0
    stated: float = 0.0
    cells: tuple[int, ...] = ()
    exercise: int = 0
    done: bool = False  # the gap of the exercise has come

    @property
    def minutes(self) -> float:
        """In a room, with questions, and with the comparing of answers after an exercise."""
        return QUESTIONS * self.told + self.gaps + (self.stated + REVIEW if self.exercise else 0.0)

    @property
    def numbers(self) -> str:
        """` [4–6]`, its code cells; nothing where there are none."""
        ends = sorted({*self.cells[:1], *self.cells[-1:]})
        return f" [{'–'.join(map(str, ends))}]" if ends else ""


def sections(notebook) -> list[Section]:
    """The sections of a chapter, its title and *At a glance* as the first.

    Cells are counted in the learner edition, whose questions have cells that the solved notebook lacks; the
    minutes are those of the solved one. What an exercise states pays for its text and for the cell with its
    gap; what comes after that cell counts as everywhere else.
    """
    found, number = [Section("Title and at a glance")], 0
    solved = {cell.id: cell for cell in notebook.cells}
    for shown in learner(notebook).cells:
        cell, paid = solved.get(shown.id), found[-1].exercise and not found[-1].done
        if shown.cell_type == "code":
            number += 1
            found[-1].cells += (number,)
            if cell and not paid:  # no cell: one for an answer, which the hands at *Predict* pay for
                found[-1].told += code_minutes(cell)
                found[-1].gaps += gap_minutes(cell.source)
            found[-1].done = found[-1].done or BEGIN in (cell.source if cell else "")
            continue
        for part in re.split(r"(?m)^(?=## )", cell.source):
            heading = part.splitlines()[0].removeprefix("## ") if part.startswith("## ") else ""
            if heading and heading != "At a glance":
                found.append(Section(heading, HANDS * (heading == "Predict")))
                if stated := re.match(r"Exercise ?(\d*).*\((\d+) minutes", heading):
                    found[-1].exercise, found[-1].stated = int(stated[1] or 1), int(stated[2])
            if not found[-1].exercise or found[-1].done:
                found[-1].told += spoken(part)
    return found


def gap_minutes(source: str) -> float:
    """Minutes at the gaps of a cell: VALUE for each in which a value takes the place of dots, else LINE."""
    values = r"#? *[\w, ]+ = (?:\.\.\.(?:, )?)+(?: *#.*)?"
    parts = re.findall(rf"{BEGIN}\n(.*?)\n *{END}", source, re.S)
    instead = [part.partition(f"{INSTEAD}\n")[2].strip() for part in parts]
    return sum(VALUE if re.fullmatch(values, one) else LINE for one in instead)


def spoken(text: str) -> float:
    """Minutes to say a piece of Markdown: no folded answers; a formula counts as three words."""
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$", " the formula here ", text, flags=re.S)
    return len(re.findall(r"\w\S*", text)) / WORDS


def code_minutes(cell) -> float:
    """Minutes to run a cell, say what its code does and look at what it shows; none for the set-up cell."""
    if "setup" in cell.metadata.get("tags", []):
        return 0.0
    if re.match(r"(import|from) ", cell.source):
        return CELL
    figures = sum("image/png" in out.get("data", {}) for out in cell.get("outputs", []))
    return CELL + len(cell.source.splitlines()) / LINES + FIGURE * figures


def instructor(notebook):
    """A notebook for the person in front: everything, with the chapter's agenda under its title."""
    rows = [f"| {one.heading.partition(' (')[0]} | {math.ceil(one.minutes)} |" for one in sections(notebook)]
    made, table = copy.deepcopy(notebook), "\n".join(["| part | minutes |", "|---|--:|", *rows])
    made.cells.insert(1, new_markdown_cell(f"## Agenda\n\n{table}", id="agenda"))
    return made
