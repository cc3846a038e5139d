"""Learners write: how much of a chapter is theirs, and whether a prediction waits for its measurement."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from course import editions

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CHANGED = re.compile(
    r"\bown_text\b|# add|# yours|check\.question\(|contract\.guess\("
)  # what learners change
PARTS = re.compile(r"\bMyCache\b|\bcheck\.board\b|\bmine\.")


def cells(path: Path) -> list[tuple[str, bool]]:
    """The code cells of a chapter's learner edition, not those that set it up: source, and whether a learner
    writes in it."""
    book = nbformat.read(path, as_version=4)
    gaps = {cell.id for cell in book.cells if editions.BEGIN in cell.source}
    found = [
        (cell.source, cell.id in gaps or bool(CHANGED.search(cell.source)))
        for cell in editions.learner(book).cells
        if cell.cell_type == "code"
    ]
    set_up = next(number for number, (source, _) in enumerate(found) if "lesson.start()" in source)
    return found[set_up + 1 :]


def test_learners_write_in_nine_cells_of_a_chapter_and_run_a_third_at_most_as_it_is():
    shares, written = [], []
    for path in CHAPTERS:
        theirs = [source for source, gap in cells(path) if gap]
        only_run = [source for source, gap in cells(path) if not gap and not PARTS.search(source)]
        written.append(len(theirs))
        shares.append(len(only_run) / len(cells(path)))
    assert min(written) >= 6 and sum(written) / len(written) >= 9, written
    assert max(shares) <= 1 / 3, shares


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_prediction_is_answered_by_a_later_cell_and_by_no_earlier_one(path):
    book = nbformat.read(path, as_version=4)
    kept, chapter = [], int(path.name[:2])
    for cell in editions.learner(book).cells:
        kept += re.findall(rf'check\.question\("({chapter}\.\d+)", \.\.\.\)', cell.source)
        for name in re.findall(r'check\.reveal\("([\d.]+)"\)', cell.source):
            assert name in kept, name
    revealed = re.findall(r'check\.reveal\("([\d.]+)"\)', "\n".join(cell.source for cell in book.cells))
    asked = [name for name in kept if name in revealed]
    assert asked and len(set(revealed)) == len(revealed)
