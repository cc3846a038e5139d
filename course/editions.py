"""Three editions of the course from the one source in notebooks/.

The notebooks are the *solution* edition. In the *learner* edition every solution is a gap, cells tagged
`instructor` are gone and no cell has an output. The *instructor* edition is the source with an agenda on top.

    ### BEGIN SOLUTION
    scores = scores / head_dim**0.5
    ### INSTEAD
    # scores = scores / head_dim
    ### END SOLUTION

A learner finds the lines after `### INSTEAD`, without their `# `, or `...  # your turn` where there are
none.
"""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from .page.build import built
from .run import execute
from .teaching.check.key import FOLDS, exercise_of, questions

DRAWINGS = Path(__file__).resolve().parents[1] / "notebooks" / "drawings"  # what each chapter opens with
BEGIN, INSTEAD, END = "### BEGIN SOLUTION", "### INSTEAD", "### END SOLUTION"
GAP = "...  # your turn"
STUCK = """*Stuck?* In a cell of your own, `check.hint("{0}")` gives three steps, one at a time, and
`check.solution("{0}")` shows a solution after a first attempt."""
CHOOSE = "# Commit yourself before you go on: write {} in place of the dots, and run this cell."
WRITE = (
    "# Write your answer in place of the dots, in quotes, and run this cell: it shows one to compare with."
)


def learner(notebook):
    """A notebook for learners: no solution, no instructor cell, no output, no metadata of either.

    What was folded away comes from the checks, whose key has it: hints and solutions when asked for, and what
    there is to say on *Predict* and *Quiz* once a learner has answered, in a cell made for it.
    """
    made = copy.deepcopy(notebook)
    made.cells = [cell for cell in made.cells if "instructor" not in cell.metadata.get("tags", [])]
    made.metadata = {
        key: made.metadata[key] for key in ("kernelspec", "language_info") if key in made.metadata
    }
    chapter, cells, count = title(made).partition(".")[0], [], 0
    for cell, after in zip(made.cells, [*made.cells[1:], None]):
        cell.metadata = {}
        cells.append(cell)
        if cell.cell_type == "code":
            cell.source, cell.outputs, cell.execution_count = open_gaps(cell.source), [], None
            continue
        exercise = after and exercise_of(after.source)
        asked = questions(cell.source)
        cell.source = FOLDS.sub("\n\n" if asked or not exercise else STUCK.format(exercise), cell.source)
        cell.source = re.sub(r"\n{3,}", "\n\n", cell.source).strip()
        if asked:
            names = [f"{chapter}.{number}" for number in range(count + 1, count + 1 + len(asked))]
            here = any(re.search(r"^(?:from|import) .*\bcheck\b", one.source, re.M) for one in cells)
            cells.append(new_code_cell(_ask(names, asked, here), id=f"{cell.id}-answer", metadata={}))
            count += len(asked)
    made.cells = [cell for cell in cells if cell.source]
    return made


def _ask(names: list[str], asked: list[dict[str, str]], imported: bool) -> str:
    """The cell in which a learner answers questions."""
    numbers = [what.partition(".")[0] for what in asked[0]]
    lines = [] if imported else ["from course.teaching import check", ""]
    lines.append(CHOOSE.format(" or ".join(numbers)) if len(numbers) > 1 else WRITE)
    return "\n".join([*lines, *(f'check.question("{name}", ...)' for name in names)])


def open_gaps(source: str) -> str:
    """Source code with every marked solution replaced; ValueError for marks that do not match."""
    kept, given, place = [], [], None  # place: None, or which part of a solution this line is in
    for line in source.splitlines():
        mark = line.strip()
        if mark == BEGIN and place is None:
            place, given, indent = BEGIN, [], line[: len(line) - len(line.lstrip())]
        elif mark == INSTEAD and place == BEGIN:
            place = INSTEAD
        elif mark == END and place is not None:
            kept += given or [indent + GAP]
            place = None
        elif mark in (BEGIN, INSTEAD, END):
            raise ValueError(f"{mark!r} out of place")
        elif place is None:
            kept.append(line)
        elif place == INSTEAD:
            given.append(re.sub(r"^(\s*)# ?", r"\1", line))
    if place is not None:
        raise ValueError(f"a solution has no {END!r}")
    return "\n".join(kept)


def solved(source: str) -> str:
    """Source code with its solutions, and without the marks around them."""
    return re.sub(rf"(?ms)^ *(?:{BEGIN}\n|(?:{INSTEAD}\n.*?)?{END}(?:\n|$))", "", source).rstrip()


def try_as_learner(path: Path) -> str:
    """Run a chapter's learner edition in an empty folder; returns what is wrong with it, or nothing.

    No cell may fail, and no check may say "correct" before a learner has written a line.
    """
    made = learner(nbformat.read(path, as_version=4))
    try:
        with tempfile.TemporaryDirectory() as folder:
            execute(made, Path(folder))
    except ValueError as error:
        return f"{path.name}, learner edition: {error}"
    for cell in made.cells:
        told = "".join(output.get("text", "") for output in cell.get("outputs", []))
        if "check." in cell.source and re.search(r"^correct", told, re.M):
            return f"{path.name}, learner edition: cell {cell.id} is correct before anybody answered"
    return ""


def minutes(notebook) -> tuple[int, int]:
    """(teaching with its small gaps, exercises), in minutes, from the metadata."""
    head = notebook.metadata.get("course", {})
    if not all(isinstance(head.get(key), int) for key in ("teach", "exercises")):
        raise ValueError("metadata `course` must give the minutes `teach` and `exercises`")
    return head["teach"], head["exercises"]


def title(notebook) -> str:
    """`1. Recompute` from the first line of the first cell."""
    return notebook.cells[0].source.splitlines()[0].lstrip("# ").strip()


def lay_out(paths: list[Path], folder: Path) -> list[str]:
    """Put the learner edition into `folder`, where a learner works; what is there already stays as it is.

    Returns the names of those that stayed and are older than the chapter they were made from.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(built(), folder)  # chapters link to it
    shutil.copytree(DRAWINGS, folder / DRAWINGS.name, dirs_exist_ok=True)
    stayed = []
    for path in paths:
        made = folder / path.name
        if not made.exists():
            nbformat.write(learner(nbformat.read(path, as_version=4)), made)
        elif made.stat().st_mtime < path.stat().st_mtime:
            stayed.append(path.name)
    return stayed
