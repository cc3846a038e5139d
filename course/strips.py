"""Strips: small pictures of a mechanism, before and after, written as text in notebooks/drawings/strips.txt.

    == 02-append
    A step appends one key: the keys that are held stay where they are.
    before | kkkkk => kkkkkc | one more
    keys   | k:The k:brown c:dog
           | -> the softmax
    scores | 1 9 2 | largest: 9

A picture has a name, a sentence that says what it shows, and rows: a label, groups of boxes with `=>`
between before and after, and a note. A box is a letter (LETTERS), with words after a colon if it has any, or
a number or word in a white box. Letters alone are written without a space, and a space between two runs of
them parts these. A row that begins with `->` is an arrow down with words beside it; an empty label continues
the row above without a gap.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvlab.plots import BLUE, GREY, GRID, INK, ORANGE, SKY, VERMILLION, YELLOW

from .drawing import WIDTH, Drawing

TEXT = Path(__file__).resolve().parents[1] / "notebooks" / "drawings" / "strips.txt"
LETTERS = {  # as in the colours of the course; w is what is no token: weights, a scale, a page's bounds
    "c": ORANGE, "k": BLUE, "q": SKY, "f": VERMILLION, "h": YELLOW, "e": GRID, "p": "#ffffff", "w": "#d5d8dd",
}  # fmt: skip
ON_DARK = ("k",)  # whose words are white
SIDE, LINE, GAP, LEFT = 24, 34, 4, 118  # points: a box, a row, between boxes, where boxes begin
LETTER = 7.8  # points of an average letter


def strips(text: str) -> dict[str, tuple[str, list[str]]]:
    """{name: (sentence, rows)} of a file of strips."""
    found = {}
    for block in re.split(r"^== ", text, flags=re.M)[1:]:
        name, sentence, *rows = [line.rstrip() for line in block.strip("\n").splitlines()]
        found[name.strip()] = sentence.strip(), [row for row in rows if row.strip()]
    return found


def draw(sentence: str, rows: list[str]) -> Drawing:
    """One strip. ValueError for a row that has no `|`, or that is too wide."""
    drawing, y = Drawing(0, sentence), 18
    for number, row in enumerate(rows):
        label, bar, rest = row.partition("|")
        if not bar:
            raise ValueError(f"{row!r}: expected label | boxes | note")
        if rest.strip().startswith("->"):
            drawing.arrow(LEFT + 12, y - 4, LEFT + 12, y + LINE - 10)
            drawing.text(LEFT + 30, y + 16, rest.strip()[2:].strip(), colour=INK)
            y += LINE
            continue
        if number and label.strip():
            y += 6
        boxes, _, note = rest.partition("|")
        drawing.text(LEFT - 12, y + 17, label.strip(), anchor="end")
        x = LEFT
        for place, group in enumerate(boxes.split("=>")):
            if place:
                drawing.arrow(x + 8, y + SIDE / 2, x + 38, y + SIDE / 2)
                x += 50
            for letter, words in _boxes(group):
                x = _box(drawing, x, y, letter, words)
        end = x + 10 + LETTER * len(note.strip()) if note.strip() else x
        if end > WIDTH:
            raise ValueError(f"{row!r}: too wide by {end - WIDTH:.0f} points")
        drawing.text(x + 10, y + 17, note.strip())
        y += SIDE + GAP
    drawing.height = y + 14
    return drawing


def _boxes(group: str) -> list[tuple[str, str]]:
    """(letter or "", words) of each box; a dot leaves room for a box, a space parts two runs."""
    found = []
    for word in group.split():
        letter, colon, words = word.partition(":")
        if colon and letter in LETTERS:
            found.append((letter, words.replace("_", " ")))
        elif all(one in LETTERS or one == "." for one in word):
            found += [(one, "") for one in word]
        else:
            found.append(("", word.replace("_", " ")))
            continue
        if not colon:
            found.append((" ", ""))
    return found[:-1] if found and found[-1][0] == " " else found


def _box(drawing: Drawing, x: float, y: float, letter: str, words: str) -> float:
    """Draw a box; returns where the next one begins."""
    if letter == " ":
        return x + 3 * GAP
    wide = max(SIDE, 9.5 * len(words) + 10) if words else SIDE
    if letter != ".":
        drawing.box(
            x, y, wide, SIDE, words, fill=LETTERS.get(letter, "#ffffff"), dashed=letter == "p",
            edge=GREY if letter and letter in "ep" else INK, ink="#ffffff" if letter in ON_DARK else INK,
        )  # fmt: skip
    if letter == "e" and not words:
        for down in (5, SIDE - 5):
            drawing.line(x + 5, y + down, x + wide - 5, y + SIDE - down, colour=GREY)
    return x + wide + GAP


def write(folder: Path) -> list[Path]:
    """Draw every strip into a folder, as SVG; returns the files."""
    paths = []
    for name, (sentence, rows) in strips(TEXT.read_text(encoding="utf-8")).items():
        paths.append(folder / f"{name}.svg")
        paths[-1].write_text(draw(sentence, rows).svg(), encoding="utf-8")
    return paths
