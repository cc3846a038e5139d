"""The agendas fit the chapters as they are, and the day that they promise."""

import itertools
import re

import pytest

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
    again = "make it again: python -m course agenda"
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


def test_the_page_of_the_room_has_the_agendas_minutes():
    half = agenda.PAGE.read_text().split("## Half a day")[1].split("\n## ")[0]
    room = agenda.PAGE.with_name("room.md").read_text().split("## Half a day")[1]
    planned = {chapter: minutes for minutes, chapter in re.findall(r"\| (\d+) \| \*\*(\d)\.", half)}
    assert planned == dict(re.findall(r"^\| (\d)[^|]*\| \d, \d \| (\d+) \|", room, re.M))
