"""The minutes of a chapter's sections in a room, and the edition for the person in front that shows them."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass

from nbformat.v4 import new_markdown_cell

from .editions import learner

WORDS, LINES = 120, 15  # words spoken and lines of code read in a minute
CELL, FIGURE, HANDS, REVIEW = 0.5, 1.0, 2.0, 2.0  # minutes: run a cell, see a figure, vote, compare answers
QUESTIONS = 1.2  # learners ask: every taught minute takes this many


@dataclass
class Section:
    """A section of a chapter.

    minutes: by the numbers above. cells: the numbers of its code cells, as Jupyter counts them. exercise: its
    number, or 0.
    """

    heading: str
    minutes: float = 0.0
    cells: tuple[int, ...] = ()
    exercise: int = 0

    @property
    def numbers(self) -> str:
        """` [4–6]`, its code cells; nothing where there are none."""
        ends = sorted({*self.cells[:1], *self.cells[-1:]})
        return f" [{'–'.join(map(str, ends))}]" if ends else ""


def sections(notebook) -> list[Section]:
    """The sections of a chapter, its title and *At a glance* as the first.

    Cells are counted in the learner edition, whose questions have cells that the solved notebook lacks; the
    minutes are those of the solved one.
    """
    found, number = [Section("Title and at a glance")], 0
    solved = {cell.id: cell for cell in notebook.cells}
    for shown in learner(notebook).cells:
        cell = solved.get(shown.id)  # None: a cell for an answer, which the hands at *Predict* pay for
        if shown.cell_type == "code":
            number += 1
            found[-1].minutes += code_minutes(cell) if cell else 0.0
            found[-1].cells += (number,)
            continue
        for part in re.split(r"(?m)^(?=## )", cell.source):
            heading = part.splitlines()[0].removeprefix("## ") if part.startswith("## ") else ""
            if heading and heading != "At a glance":
                found.append(Section(heading, HANDS * (heading == "Predict")))
            found[-1].minutes += spoken(part)
    for section in found:
        stated = re.match(r"Exercise ?(\d*).*\((\d+) minutes", section.heading)
        if stated:
            section.exercise = int(stated[1] or 1)
            section.minutes = int(stated[2]) + REVIEW
        else:
            section.minutes *= QUESTIONS
    return found


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
