"""Slides show what cells hold, are read from the back of a room, and need no network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import editions, pdf, slides

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


def test_a_vote_shows_its_answer_in_a_second_step_and_tells_the_speaker_what_the_others_think():
    made = one(
        "markdown", VOTE, {"show": "vote", "title": "T", "answer": "2. A square.", "wrong": ["Zero: no."]}
    )
    assert made.shown.count("<li>") == 2 and "details" not in made.shown
    right = made.shown.split("<li>")[2]
    assert 'class="mark fragment"' in right and 'class="because fragment"' in right and "A square." in right
    assert "That is once." in made.notes and "Zero: no." in made.notes
    assert "Yes." not in made.notes and "Run the next" not in made.notes
    asked, answered = slides.page([made], "x", paper=True).split("<section")[1:]
    assert 'class="asked"' in asked and 'class="answered"' in answered


def test_an_exercise_has_its_name_and_its_minutes():
    made = one("markdown", "## Exercise 2: a bug (15 minutes, difficulty 2)", {"show": "exercise"})
    assert (made.title, made.timer) == ("Exercise 2: a bug", 15)


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


def test_learners_do_not_get_what_the_speaker_knows():
    for book in BOOKS.values():
        made = editions.learner(book)
        assert not any(cell.metadata for cell in made.cells)
        handed = nbformat.writes(made)
        for cell in book.cells:
            for given in cell.metadata.get("slides", []):
                assert all(
                    json.dumps(said)[1:-1] not in handed for said in [given["say"], *given.get("wrong", [])]
                )


def test_a_page_needs_nothing_else():
    html = slides.page(deck_of(CHAPTERS[0].stem), "x")
    outside = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]{1,60})', html)
    assert all(address.startswith("data:") for address in outside)


def test_the_talk_has_the_slides_that_it_names_and_what_to_say():
    text = slides.TALK.read_text()
    made = slides.talk(list(BOOKS.values()), text)
    named = [title for _, titles, _, _ in slides.order(text) for title in titles]
    assert [slide.title for slide in made][2:] == named[1:]
    assert made[1] == replace(slides.STORY, shown=made[1].shown) and 'type="image/svg+xml"' in made[1].shown
    assert made[0].title == "What does a cache still hold?"  # and no chapter's title
    assert sum("picture" in slide.kind for slide in made) >= 7
    assert sum(slide.minutes for slide in made) == 18  # two more for questions
    assert "causal" in made[4].notes and "A square" not in made[5].notes
    with pytest.raises(ValueError, match="chapter 3 has no slide 'First!'"):
        slides.talk([chapter()], "# T\n\n## 1. Chapter 3: First! (1 minute)\n\nSay.")


def test_a_pdf_has_a_sheet_for_each_slide_and_two_for_a_vote(tmp_path, browser):
    name = CHAPTERS[2].stem
    made = pdf.write(slides.page(deck_of(name), "x", paper=True), tmp_path / "x.pdf").read_bytes()
    asked = sum("fragment" in slide.shown for slide in deck_of(name))
    assert len(re.findall(rb"/Type\s*/Page\b", made)) == len(deck_of(name)) + asked
    assert set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", made)) == {
        b"0 0 960 540"
    }  # points: 1280 x 720 pixels


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


def test_keys_open_the_speakers_window_and_start_the_countdown(tmp_path, browser):
    deck = deck_of(CHAPTERS[2].stem)
    page = tmp_path / "deck.html"
    page.write_text(slides.page(deck, "deck"))
    browser.size(slides.WIDE, slides.HIGH)
    at = next(number for number, slide in enumerate(deck) if slide.kind == "exercise")
    browser.open(f"{page.as_uri()}#/{at}", "window.Reveal && Reveal.isReady()")
    browser.press("s")
    browser._wait(lambda: browser.run("!!(speaker && speaker.document && speaker.document.body)"))
    told = browser.run("speaker.document.body.innerText")
    assert f"Slide {at + 1} of {len(deck)}" in told and "Wrong answers to expect" in told
    assert f"{deck[at].timer} to work" in told
    browser.press("ArrowRight")
    assert f"Slide {at + 2} of" in browser.run("speaker.document.body.innerText")
    browser.press("ArrowLeft")
    timer = "document.querySelector('section.present .timer')"
    assert f"{deck[at].timer}:00" in browser.run(f"{timer}.innerText")
    done_by = "speaker.document.body.innerText.match(/done by (\\d+)/)[1]"
    before = int(browser.run(done_by))
    browser.press("t")
    assert int(browser.run(done_by)) == before + deck[at].timer  # an exercise counts once it was begun
    browser._wait(lambda: f"{deck[at].timer - 1}:" in browser.run(f"{timer}.innerText"))
    assert "Pause" in browser.run(f"{timer}.innerText")
    browser.press("t")
    calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", features=calm)
    browser._wait(lambda: f"{deck[at].timer} min" in browser.run(f"{timer}.innerText"))
    assert browser.run(f"getComputedStyle({timer}.querySelector('progress')).display") == "none"
    browser.run("speaker.close()")
    assert browser.errors == []


def test_decks_are_written_with_the_live_page_beside_them(tmp_path):
    made = slides.write(CHAPTERS[:1], tmp_path)
    assert [path.name for path in made] == [
        f"{CHAPTERS[0].stem}.html"
    ]  # and no talk, which needs all chapters
    assert (tmp_path / "page.html").exists() and 'href="page.html#method=full"' in made[0].read_text()
    slides.write(CHAPTERS[:1], tmp_path / "kit", live="../page.html")
    assert not (tmp_path / "kit" / "page.html").exists()
