"""Learners write: how much of a chapter is theirs, and whether a prediction waits for its measurement."""

import re
from pathlib import Path

import nbformat
import pytest

from course import editions

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CHANGED = re.compile(
    r"\bown_text\b|# add|# yours|check\.question\(|contract\.guess\("
)  # what learners change


def cells(path: Path) -> list[bool]:
    """The code cells of a chapter's learner edition, its set-up too: whether a learner writes in it.

    He does where there is a gap, a proposal to choose, or a value of his own to give. A cell that is complete
    is one that he only runs, though it may run what he wrote elsewhere.
    """
    book = nbformat.read(path, as_version=4)
    gaps = {cell.id for cell in book.cells if editions.BEGIN in cell.source}
    return [
        cell.id in gaps or bool(CHANGED.search(cell.source))
        for cell in editions.learner(book).cells
        if cell.cell_type == "code"
    ]


def test_learners_write_in_nine_cells_of_a_chapter_and_run_a_third_at_most_as_it_is():
    theirs = {path.stem: sum(cells(path)) for path in CHAPTERS}
    only_run = {path.stem: cells(path).count(False) / len(cells(path)) for path in CHAPTERS}
    assert min(theirs.values()) >= 9, theirs
    assert max(only_run.values()) <= 1 / 3, only_run


@pytest.mark.parametrize("path", CHAPTERS[1:], ids=lambda path: path.stem)
def test_a_chapter_asks_the_learners_own_cache_about_clause_17(path):
    text = path.read_text(encoding="utf-8")
    begins = path.stem[:2] in ("01", "08")  # as nothing; of parts that are already written
    assert "class MyCache(" in text and ("mine.clause17(" if begins else "check.clause17(") in text


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


@pytest.mark.parametrize("chapter", (0, 2, 4, 5, 7, 9))
def test_the_live_page_stands_where_its_mechanism_is_met(chapter):
    (path,) = (path for path in CHAPTERS if path.name.startswith(f"{chapter:02}"))
    before, _, _ = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells).partition(
        "## Appendix"
    )
    assert "pictures.page(" in before
