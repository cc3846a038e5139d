"""Rules that every notebook keeps, and proof that a changed number would be noticed."""

import math
import re
from pathlib import Path

import nbformat
import pytest

from course import editions, text
from course.clock import sections
from course.teaching import check, lease
from course.teaching.check.key import exercise_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
AT_HOME = ("Appendix", "On your own", "References")  # headings that no card counts
BOOKS = {path.stem: nbformat.read(path, as_version=4) for path in CHAPTERS}
pytestmark = pytest.mark.skipif(not CHAPTERS, reason="no notebooks in this checkout")


def main_line(book):
    return [part for part in sections(book) if not part.heading.startswith(AT_HOME)]


def optional(book) -> int:
    """Minutes of the exercises in a chapter's appendix."""
    text = "\n".join(cell.source for cell in book.cells)
    return sum(map(int, re.findall(r"^### Exercise.*?\((\d+) minutes", text, re.M)))


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", BOOKS)
def test_it_was_run_from_top_to_bottom(name):
    assert [cell.execution_count for cell in code(BOOKS[name])] == list(range(1, len(code(BOOKS[name])) + 1))


@pytest.mark.parametrize("name", BOOKS)
def test_nothing_is_stored_that_should_not_be(name):
    book = BOOKS[name]
    assert "widgets" not in book.metadata
    for cell in code(book):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", cell.id
            assert not any("widget" in kind for kind in output.get("data", {})), cell.id
    whole = nbformat.writes(book)
    own = re.search(r"/(?:home|Users|work|tmp|root)/\w|[A-Z]:\\\\Users", whole)
    assert own is None, own
    assert len(whole.encode()) <= 300_000


@pytest.mark.parametrize("name", BOOKS)
def test_every_image_has_an_alternative_text(name):
    for cell in BOOKS[name].cells:
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    assert len(output.metadata[kind]["alt"]) > 20, cell.id
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[\s*\]\(", cell.source) and "<img" not in cell.source


@pytest.mark.parametrize("name", BOOKS)
def test_the_frame_is_the_same_in_every_chapter(name):
    book = BOOKS[name]
    teach, exercises = editions.minutes(book)
    glance = next(cell.source for cell in book.cells if cell.source.startswith("## At a glance"))
    more = f", and {optional(book)} in the appendix" if optional(book) else ""
    for row in (f"| teaching | {teach} minutes, with", f"| exercises | {exercises} minutes{more} |"):
        assert row in glance
    needed = main_line(book)
    taught = sum(part.told + part.gaps for part in needed)
    assert abs(taught - teach) <= 1 and sum(part.stated for part in needed) == exercises
    assert max(taught, teach) + exercises <= 75
    assert editions.title(book).split(".")[0] == str(int(name[:2]))
    assert code(book)[0].source == text.SETUP
    headings = re.findall(
        r"^###? (.*)$", "\n".join(c.source for c in book.cells if c.cell_type == "markdown"), re.M
    )
    assert "Key points" in headings and "Predict" in headings
    if name[:2] != "00":
        assert sum(heading.startswith("Exercise") for heading in headings) == 3
        for heading in ("What it costs", "When it does not help", "Quiz", "References"):
            assert heading in headings


@pytest.mark.parametrize("name", BOOKS)
def test_every_code_cell_is_python_and_seconds_are_not_compared(name):
    for cell in code(BOOKS[name]):
        if "setup" not in cell.metadata.get("tags", []):
            compile(cell.source, cell.id, "exec")
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            assert not re.search(r"\d\s*(ms|µs)\b", printed), f"{cell.id} compares seconds"


@pytest.mark.parametrize("name", BOOKS)
def test_an_exercise_is_correct_and_has_two_hints_and_a_solution(name):
    book = BOOKS[name]
    for index, cell in enumerate(book.cells):
        if "### BEGIN SOLUTION" in cell.source:
            printed = "".join(output.get("text", "") for output in cell.outputs)
            if not exercise_of(cell.source):  # a line that a measurement judges, or a part of a cache
                assert "check.measured(" not in cell.source or "correct: you say" in printed, cell.id
                continue
            assert printed.startswith("correct"), cell.id
            around = "".join(c.source for c in book.cells[index - 1 : index + 2] if c.cell_type == "markdown")
            for part in ("Hint 1", "Hint 2", "Solution"):
                assert f"<summary>{part}" in around, cell.id


@pytest.mark.parametrize("name", BOOKS)
def test_a_prediction_that_is_revealed_has_an_answer(name):
    """Questions are numbered in the order of a chapter, its quiz among them."""
    for asked in re.findall(r'check\.reveal\("(.+?)"\)', "".join(cell.source for cell in code(BOOKS[name]))):
        assert any(what.startswith("Yes") for what in check.QUESTIONS[asked].values()), asked


def test_the_readme_says_the_minutes_of_the_chapters():
    books = BOOKS.values()
    alone = [sum(editions.minutes(book)) for book in books]
    room = [math.ceil(sum(part.minutes for part in main_line(book))) for book in books]
    more = [optional(book) for book in books if optional(book)]
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"takes {min(alone)} to {max(alone)} minutes with its exercises" in said
    assert f"it takes {min(room)} to {max(room)}" in said
    assert f"{min(more)} to {max(more)} minutes more" in said


def test_the_way_through_text_keeps_every_cell():
    for book in BOOKS.values():
        written = text.to_text(book)
        again = text.to_notebook(written)
        assert again.metadata.course == book.metadata.course and text.to_text(again) == written
        told = [[(c.cell_type, c.source, c.metadata) for c in each.cells] for each in (again, book)]
        assert told[0] == told[1]


@pytest.mark.parametrize("name", [name for name in BOOKS if name[:2] != "00"])
def test_a_chapter_quotes_a_clause_of_the_lease_word_for_word(name):
    text = "\n".join(cell.source for cell in BOOKS[name].cells if cell.cell_type == "markdown")
    number, said = re.search(r"^> \*\*Clause (\d+)\.\*\* ((?:.|\n> )+)", text, re.M).groups()
    clause = lease.written("", int(number), int(number))
    assert int(number) != lease.CLAUSE and said.replace("\n> ", " ").strip() in clause
