"""Slides hold the tagged cells and their pictures, and show without a network."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import slides

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("[0-9]*.ipynb"))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def chapter():
    picture = lambda: [new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "x"}})]
    tagged = lambda text, tag: new_markdown_cell(text, metadata={"tags": [tag]})
    return new_notebook(
        cells=[
            new_markdown_cell("# 3. Title\n\nA claim."),
            new_code_cell("early = 1", outputs=picture()),
            tagged("## First\n\nThe formula $n^2$.", "slide"),
            new_code_cell("secret_code()", outputs=picture()),
            new_code_cell("no_picture()"),
            tagged("More.", "subslide"),
            new_markdown_cell("## Not a slide"),
            new_code_cell("late()", outputs=picture()),
        ]
    )


def test_tagged_cells_and_their_pictures_become_slides():
    made = slides.slides(chapter())
    kinds = [(cell.metadata["slideshow"]["slide_type"], cell.source[:8]) for cell in made.cells]
    assert kinds == [("slide", "# 3. Tit"), ("subslide", "early = "), ("slide", "## First"),
                     ("subslide", "secret_c"), ("subslide", "More.")]  # fmt: skip
    assert "<msup>" in made.cells[2].source


def test_a_page_shows_pictures_without_their_code_and_needs_nothing_else():
    html = slides.page(chapter())
    assert "3. Title: slides" in html and "secret_code" not in html and PIXEL in html
    outside = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]{1,60})', html)
    assert all(address.startswith("data:") for address in outside)


def test_the_talk_takes_twenty_minutes_and_what_is_said_fits_them():
    text = slides.TALK.read_text()
    assert sum(int(minutes) for minutes in re.findall(r"(?m)^## .+ \((\d+) minutes?\)$", text)) == 20
    parts = re.split(r"(?m)^## ", text)[1:]
    assert len(slides.order(text)) == len(parts) - 1  # questions have no slide
    for part in parts[:-1]:
        heading, said = part.split("\n", 1)
        minutes = int(re.search(r"\((\d+) minute", heading)[1])
        spoken = len(re.findall(r"\w\S*", said)) / 120 + 0.5 * said.count("*(Hands)*")
        assert 0.6 * minutes <= spoken <= minutes + 0.1, heading


def test_the_talk_has_the_slides_that_it_names_with_their_pictures():
    books = [nbformat.read(path, as_version=4) for path in CHAPTERS]
    text = slides.TALK.read_text()
    made = slides.talk(books, text)
    first = [c.source.splitlines()[0].lstrip("# ") for c in made.cells
             if c.metadata["slideshow"]["slide_type"] == "slide"]  # fmt: skip
    assert first[0] == "What does a cache still hold?"  # and no chapter's title
    assert first[1:] == [heading for _, heading, _ in slides.order(text)][1:]
    assert sum(bool(slides.pictures(cell)) for cell in made.cells) >= 7
    assert len({cell.id for cell in made.cells}) == len(made.cells)
    with pytest.raises(ValueError, match="chapter 3 has no slide 'First!'"):
        slides.talk([chapter()], "# T\n\n## 1. Chapter 3: First! (1 minute)\n")
    assert [c.id for c in slides.talk([chapter()], "# T\n\n## 1. Chapter 3: First (1 minute)\n").cells] == [
        "talk0", "talk1", "talk2",
    ]  # fmt: skip


def test_the_talk_in_a_browser(tmp_path, browser):
    page = slides.write(CHAPTERS, tmp_path)[-1]
    assert page.name == "talk.html"
    browser.size(1280, 760)
    browser.open(page.as_uri(), "window.Reveal && Reveal.isReady()")
    assert browser.run("Reveal.getHorizontalSlides().length") == len(slides.order(slides.TALK.read_text()))
    assert browser.errors == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_slides_of_a_chapter_in_a_browser(path, tmp_path, browser):
    if not slides.write([path], tmp_path):
        pytest.skip("no cell of this chapter is tagged as a slide")
    page = tmp_path / f"{path.stem}.html"
    browser.size(1280, 760)
    browser.open(page.as_uri(), "window.Reveal && Reveal.isReady()")
    expected = len(slides.slides(nbformat.read(path, as_version=4)).cells)
    assert browser.run("Reveal.getTotalSlides()") == expected
    browser.press("ArrowRight")
    assert browser.run("Reveal.getIndices().h") == 1
    assert browser.errors == []
    assert [x for x in browser.requests if not x.startswith("data:")] == [page.as_uri()]
