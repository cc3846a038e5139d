"""Agendas: which parts of the chapters fill three hours, a day or two evenings, and what to skip when late.

    python -m course agenda                 write the page of all agendas, agenda.md
    python -m course agenda --hours 3       print the one that fills the most of so many hours

The plans (`plans.py`) name sections and exercises. How long each takes is counted in the chapters: words at a
speaker's pace, code at a reader's, a minute for each figure, two for the hands at *Predict*, an exercise as
long as it says (`course/clock.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import nbformat

from course.clock import LINE, LINES, REVIEW, VALUE, WORDS, Section, sections
from course.kit.pack import scores
from course.quiz import questions

from .plans import AGAIN, AGENDAS, STAND, Chapter, Pause

PAGE = Path(__file__).resolve().with_name("agenda.md")
NOTEBOOKS = PAGE.parents[2] / "notebooks"
AT_HOME = ("Common mistakes", "Quiz", "On your own", "References", "Appendix")  # are never taught


def find(some: list[Section], named: str) -> Section | None:
    """The section with a heading, or beginning with it, or `exercise 2`; None if there is none."""
    for section in some:
        if named.lower() == f"exercise {section.exercise}" and section.exercise:
            return section
        if section.heading == named or section.heading.startswith((f"{named}:", f"{named} (")):
            return section
    return None


def one(some: list[Section], named: str) -> Section:
    """As `find`; ValueError if there is none."""
    if (section := find(some, named)) is None:
        raise ValueError(f"no section {named!r}")
    return section


@dataclass(frozen=True)
class Row:
    """A line of an agenda. sections: those done; late: (what, minutes it saves)."""

    start: int
    minutes: int
    what: str
    sections: tuple[Section, ...] = ()
    parts: tuple[int, ...] = ()  # whole minutes of each section; they make up `minutes`
    late: tuple[tuple[str, int], ...] = ()


def done(chapter: Chapter, found: list[Section]) -> list[Section]:
    """The sections of a chapter that an agenda does in the room, in their order."""
    home = [one(found, name) for name in chapter.home]
    left = [section for section in found if section.exercise and section.exercise not in chapter.exercises]
    taught = [section for section in found if section.heading.partition(":")[0] not in AT_HOME]
    return [section for section in taught if section not in home and section not in left]


def session(
    start: str, items: tuple, chapters: dict[int, list[Section]], titles: dict[int, str]
) -> list[Row]:
    """The rows of one session, with a clock in minutes since midnight."""
    hour, minute = map(int, start.split(":"))
    clock, rows = 60 * hour + minute, []
    for item in items:
        if isinstance(item, Pause):
            rows.append(Row(clock, item.minutes, item.what))
        else:
            held, title = done(item, chapters[item.number]), titles[item.number]
            cut = held.index(one(held, item.rest)) + 1 if item.rest else len(held)
            rows.append(taught(clock, title, held[:cut], item.late))
            if held[cut:]:
                rows.append(Row(rows[-1].start + rows[-1].minutes, STAND.minutes, STAND.what))
                again = rows[-1].start + rows[-1].minutes
                rows.append(taught(again, f"{title}, continued", held[cut:], item.late))
        clock = rows[-1].start + rows[-1].minutes
    return rows


def taught(start: int, what: str, held: list[Section], late: tuple[str, ...]) -> Row:
    """The row of these sections; late: names, among them those of other rows."""
    parts = whole([section.minutes for section in held])
    saved = {name: parts[held.index(section)] for name in late if (section := find(held, name))}
    return Row(start, sum(parts), what, tuple(held), tuple(parts), tuple(saved.items()))


def whole(minutes: list[float]) -> list[int]:
    """Whole numbers that make up the sum, rounded up; 1 at the least, each less than 1 from what it was."""
    found = [max(1, math.floor(one)) for one in minutes]
    spare = max(0, math.ceil(sum(minutes)) - sum(found))
    by_need = sorted(range(len(minutes)), key=lambda number: found[number] - minutes[number])
    for number in by_need[:spare]:
        found[number] += 1
    return found


def untaught(sessions: list[tuple]) -> list[int]:
    """The numbers of the quiz's questions whose chapter an agenda does not teach."""
    taught = {item.number for _, _, items in sessions for item in items if isinstance(item, Chapter)}
    return [question.number for question in questions() if question.chapter not in taught]


def unpredicted(sessions: list[tuple], chapters: dict[int, list[Section]]) -> list[int]:
    """The chapters of an agenda that leave all that there is to predict for home."""
    items = [item for _, _, some in sessions for item in some if isinstance(item, Chapter)]
    asking = lambda item: any(one.heading == "Predict" for one in done(item, chapters[item.number]))
    return sorted({item.number for item in items} - {item.number for item in items if asking(item)})


def scoring(sessions: list[tuple]) -> list[int]:
    """The chapters of an agenda that need lm-eval, which a kit brings on request."""
    paths = {int(path.name[:2]): path for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))}
    taught = sorted({i.number for _, _, items in sessions for i in items if isinstance(i, Chapter)})
    return [number for number in taught if scores(nbformat.read(paths[number], as_version=4))]


def time(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"


def read() -> tuple[dict[int, list[Section]], dict[int, str]]:
    """The sections and the titles of all chapters, by number."""
    books = [nbformat.read(path, as_version=4) for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))]
    titles = [book.cells[0].source.splitlines()[0].lstrip("# ").strip() for book in books]
    numbers = [int(title.partition(".")[0]) for title in titles]
    return dict(zip(numbers, map(sections, books))), dict(zip(numbers, titles))


HEAD = f"""# Agendas

Counted in the chapters as they are: `python -m course agenda`
makes this page, and a test compares.

**How to read them.** *The same answer? [10–12] 5* is the section of that name, code cells 10 to 12 from the
top of a learner's notebook (the numbers that Jupyter shows there after *Restart Kernel and Run All Cells*),
5 minutes. The solved notebooks lack the cells in which learners answer *Predict* and *Quiz*: there all later
numbers are lower. A section or exercise that is not named stays for home: run its cells when you pass them,
and say nothing, since later cells use what they define. *Late?* names what to leave out first, and the
minutes it saves; never leave out *Predict* or *When it does not help* of a
mechanism that you teach.

**The clock.** {WORDS} words and {LINES} lines of code in a minute, half a minute to run a cell, one for each
figure, two for the hands at *Predict*, a fifth more for questions. At a small gap a middle learner takes
{VALUE:.0f} minute for a number and {LINE:.0f} for a line of code: an estimate, see *Half a day at three
speeds* in [room.md](room.md). An exercise takes the minutes it states, and {REVIEW:.0f} to compare answers.
An appendix is left for home, with its exercises. An instructor's notebook begins with these minutes of
all its sections, rounded up. The card on top of a chapter counts for one reader: no questions, and no
answers to compare.
"""


def page() -> str:
    """All agendas as one page of Markdown."""
    found = read()
    return "\n".join([HEAD, *(agenda(name, *found) for name in AGENDAS)]).rstrip() + "\n"


def agenda(name: str, chapters: dict[int, list[Section]], titles: dict[int, str]) -> str:
    """One agenda in Markdown."""
    sessions, parts = AGENDAS[name], [f"## {name}\n"]
    if AGAIN in sessions[-1][2] and (gone := untaught(sessions)):
        listed = " and ".join(", ".join(map(str, some)) for some in (gone[:-1], gone[-1:]) if some)
        parts.append(
            f"The quiz: strike {listed} from the printed sheet, and leave out these columns of "
            "`class.csv`; their chapters are not taught.\n"
        )
    if needing := scoring(sessions):
        parts.append(
            f"The set-up: chapter {' and '.join(map(str, needing))} needs lm-eval, 140 MB more. Learners "
            "start at home with `sh start.sh --all` (Windows: `start.bat --all`), a stick is filled with "
            "`sh start.sh --stick --all`, and the check in the room is `sh start.sh --all --check`.\n"
        )
    if numbers := unpredicted(sessions, chapters):
        parts.append(
            f"*Predict* of chapter {' and '.join(map(str, numbers))} stays for home. Its cells run all the "
            "same and print the answer, so ask for hands before you run them, which takes two minutes.\n"
        )
    for index, (start, end, items) in enumerate(sessions, 1):
        rows = session(start, items, chapters, titles)
        if len(sessions) > 1:
            parts.append(f"### Evening {index}\n")
        parts.append("| from | minutes | what | late? leave out |\n|--:|--:|---|---|")
        for row in rows:
            late = "; ".join(f"{what} (−{minutes})" for what, minutes in row.late)
            parts.append(f"| {time(row.start)} | {row.minutes} | {told(row)} | {late} |")
        last = rows[-1].start + rows[-1].minutes
        parts.append(f"| {time(last)} | | end; the room is yours until {end} | |\n")
    return "\n".join(parts)


def fitting(hours: float) -> str:
    """The agenda of one session, from chapter 0 on, that fills the most of these hours. ValueError where all
    are longer."""
    lengths = {}
    for name, ((start, end, items), *more) in AGENDAS.items():
        (since, before), (until, after) = (map(int, one.split(":")) for one in (start, end))
        if not more and any(isinstance(item, Chapter) and not item.number for item in items):
            lengths[name] = until - since + (after - before) / 60
    if not (fits := [name for name, length in lengths.items() if length <= hours]):
        raise ValueError(f"--hours {hours:g}: the shortest agenda takes {min(lengths.values()):g} hours")
    return max(fits, key=lengths.get)


def told(row: Row) -> str:
    """What a row does, in words: a chapter with its sections, their cells and minutes."""
    if not row.sections:
        return row.what
    each = zip(row.sections, row.parts)
    parts = (f"{s.heading.partition(' (')[0]}{s.numbers} {minutes}" for s, minutes in each)
    return f"**{row.what}**: " + " · ".join(parts)
