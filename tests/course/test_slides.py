"""Slides show what cells hold, are read from the back of a room, and need no network."""

import re
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import slides

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("[0-9]*.ipynb"))
BOOKS = {path.stem: nbformat.read(path, as_version=4) for path in CHAPTERS}
NAMES = [name for name, book in BOOKS.items() if any(cell.metadata.get("slides") for cell in book.cells)]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MEASURE = (Path(__file__).parent / "measure_slides.js").read_text()


@cache
def deck_of(name):
    """The deck of a chapter, made when a test asks for it: one that cannot be made fails its own tests."""
    return slides.deck(BOOKS[name])


def cell(kind, source, *given, **more):
    """A cell with slides."""
    make = {"markdown": new_markdown_cell, "code": new_code_cell}[kind]
    return make(source, metadata={"tags": ["slide"], "slides": list(given)} if given else {}, **more)


def chapter(*cells):
    return new_notebook(cells=[cell("markdown", "# 3. Title\n\nA claim.", {"show": "title"}), *cells])


def one(kind, source, given, **more):
    return slides.deck(chapter(cell(kind, source, given, **more)))[1]


VOTE = """## Predict

How many?

1. about $n$
2. about $n^2$

<details><summary>1. about n</summary>That is once. Run the next cell.</details>
<details><summary>2. about n²</summary>Yes. Run the next cell.</details>"""


def test_what_is_shown_comes_from_the_cell():
    picture = new_output(
        "display_data",
        {"image/png": PIXEL},
        metadata={"image/png": {"alt": "All fit.", "width": 9, "height": 3, "letters": 1}},
    )
    made = one("code", "secret_code()", {"show": "picture", "title": "T"}, outputs=[picture])
    assert (
        PIXEL in made.shown and made.words == "<p>All fit.</p>" and "secret" not in slides.page([made], "x")
    )
    made = one("markdown", "Then $n$.\n\n$$a^2 .$$ $$b^2$$", {"show": "formula 2", "title": "T"})
    assert "<msup>" in made.shown and "<mi>b</mi>" in made.shown and "<mi>a</mi>" not in made.shown
    printed = [new_output("stream", text="a   1\nb   2\nc   3\n")]
    assert ">a  1\nc  3<" in one("code", "x", {"show": "output 1,3", "title": "T"}, outputs=printed).shown
    assert (
        ">two()\nthree()<"
        in one("code", "if one:\n    two()\n    three()", {"show": "code 2-3", "title": "T"}).shown
    )
    assert slides.deck(chapter())[0].title == "3. Title"


@pytest.mark.parametrize(
    "kind, source, given, said",
    [
        ("code", "x", {"title": "T", "show": "picture"}, "has drawn no picture"),
        ("code", "x", {"title": "T", "show": "code 2"}, "lines 2: there are 1"),
        ("code", "x" * 90, {"title": "T", "show": "code"}, "a line of 90 characters, and 79 find room"),
        ("markdown", "x", {"title": "T", "show": "drawing"}, "has no drawing"),
        ("markdown", "x", {"title": "T", "show": "formula"}, "has 0 formulas"),
        ("markdown", "x", {"title": "T", "show": "table"}, "has no table"),
        ("markdown", VOTE, {"title": "T", "show": "vote"}, "needs the `answer`"),
        ("markdown", VOTE, {"title": "T", "show": "vote", "answer": "3. x"}, "none of the choices 1, 2"),
        ("markdown", "x", {"show": "exercise"}, "no heading `## Exercise"),
        ("markdown", "x", {"show": "film"}, "show='film': expected one of title, drawing"),
        ("markdown", "x", {"colour": "red"}, "unknown colour"),
        ("markdown", "x", {"show": "point", "words": ["W"]}, "a slide needs a `title`"),
    ],
)
def test_a_slide_that_cannot_be_shown_is_refused_with_its_cell(kind, source, given, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        one(kind, source, given)
    assert "3. Title, cell " in str(error.value)


@pytest.mark.parametrize("name", [*NAMES, "talk"])
def test_every_slide_is_read_from_the_back_of_a_room(name, tmp_path, browser):
    """Measured at 1280 x 720: 24 pixels and more, at most 40 words, nothing scrolls, nothing is cut."""
    deck = deck_of(name) if name in NAMES else slides.talk(list(BOOKS.values()), slides.TALK.read_text())
    page = tmp_path / f"{name}.html"
    page.write_text(slides.page(deck, name))
    browser.size(slides.WIDE, slides.HIGH)
    browser.open(page.as_uri(), "window.Reveal && Reveal.isReady()")
    found = browser.run(MEASURE)
    assert len(found) == len(deck)
    for slide in found:
        assert slide["smallest"] >= 24 and slide["words"] <= 40 and slide["cut"] == [], slide
    assert browser.errors == []
    assert [x for x in browser.requests if not x.startswith("data:")] == [page.as_uri()]
