"""The agendas fit the chapters as they are, and the day that they promise."""

from __future__ import annotations

import itertools
import re

import nbformat
import pytest

from course import editions
from course.instructor import agenda

CHAPTERS, TITLES = agenda.read()
SESSIONS = [
    pytest.param(start, end, items, id=f"{name} {number}")
    for name, sessions in agenda.AGENDAS.items()
    for number, (start, end, items) in enumerate(sessions, 1)
]


def minutes(time: str) -> int:
    hour, minute = map(int, time.split(":"))
    return 60 * hour + minute


def test_the_page_is_that_of_the_chapters():
    again = "make it again: python -m course.instructor.agenda"
    assert agenda.PAGE.read_text() == agenda.page(), again


@pytest.mark.parametrize("start, end, items", SESSIONS)
def test_the_minutes_of_a_session_add_up_and_end_in_time(start, end, items):
    rows = agenda.session(start, items, CHAPTERS, TITLES)
    assert rows[0].start == minutes(start)
    for row, after in itertools.pairwise(rows):
        assert after.start == row.start + row.minutes
    assert rows[-1].start + rows[-1].minutes <= minutes(end)
    for row in rows:
        if row.sections:
            assert 0 <= row.minutes - sum(section.minutes for section in row.sections) < 1
            assert sum(row.parts) == row.minutes and min(row.parts) >= 1
            assert all(abs(part - one.minutes) < 1 for part, one in zip(row.parts, row.sections))


@pytest.mark.parametrize("path", sorted(agenda.NOTEBOOKS.glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_the_cells_are_where_the_learner_finds_them(path):
    """Counted here by another way, in the notebook that learners are handed; the page is read, not made."""
    book = editions.learner(nbformat.read(path, as_version=4))
    title, heading, number, there = editions.title(book), "Title and at a glance", 0, {}
    for cell in book.cells:
        if cell.cell_type == "code":
            number += 1
            there.setdefault(heading, []).append(number)
        elif headings := re.findall(r"(?m)^## (?!At a glance)(.*?)(?: \(.*)?$", cell.source):
            heading = headings[-1]
    wrong = []
    for line in agenda.PAGE.read_text().splitlines():
        if f"**{title}" in line:
            told = line.split("**: ")[1].split(" | ")[0].split(" · ")
            for said, first, last in re.findall(r"(?m)^(.+?) \[(\d+)(?:–(\d+))?\] \d+$", "\n".join(told)):
                if [int(first), int(last or first)] != [there[said][0], there[said][-1]]:
                    wrong.append((said, first, last, there[said]))
    assert wrong == []
