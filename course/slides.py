"""Slides of a chapter and of the talk, from the metadata of cells: one HTML file that needs no network.

A cell tagged `slide` has one or more entries in its metadata `slides`. An entry has the words; the rest of
the slide comes from the cell: its drawing, formula, choices or task, a stored picture, or lines that it
printed. So when a chapter draws a picture again, its slide shows the new one. As text (course/text.py):

    ```{slide}
    title: The price of a token          in Markdown; a picture without `words` shows its own sentence
    show: output 1-3                     title, drawing, formula N, picture N, output LINES, code LINES,
                                         table, vote, exercise, point; nothing if words are enough
    words: Kept, not computed.           Markdown; each `words` is a paragraph
    choice: 1. all of it                 in the place of the cell's own choices, where those are long
    answer: 2. It stays.                 the choice that is right, marked in a second step, and why
    minutes: 2                           to speak; an exercise takes what its heading says
    say: What the speaker says.          only in the speaker's window (key s)
    wrong: "all": what to reply.         an answer to expect; for a vote, those in the cell's folds come first
    live: method=h2o&budget=20           the live page with these choices, linked
    ```

reveal.js 6 (MIT, its licence beside it in course/reveal) turns the pages; slides.js has the speaker's window
and the countdown of exercises.
"""

from __future__ import annotations

import base64
import re
import shutil
import textwrap
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import jinja2
import nbformat
from nbconvert.filters import markdown2html

from . import pdf
from .editions import DRAWINGS, title
from .mathml import formulas
from .page.build import built
from .site import in_columns, squeeze
from .teaching.check.key import FOLDS

HERE = Path(__file__).resolve().parent
TALK = HERE / "instructor" / "talk.md"
WIDE, HIGH = 1280, 720  # pixels of a slide
COLUMNS = 79  # characters of 24 pixels that stand side by side on a slide
TALL = 1.6  # a picture less wide than this, in its heights, has its words beside it
FIELDS = ("title", "show", "words", "choice", "answer", "minutes", "say", "wrong", "live")
CHOICE = re.compile(r"(?m)^(?:- )?(\d|[a-e])\. (.+)$")
EXERCISE = re.compile(r"(?m)^###? (Exercise.*?) \((\d+) minutes")
FOLD = re.compile(r"<details><summary>(\d\. .*?)</summary>(.*?)</details>", re.S)


@dataclass(frozen=True)
class Slide:
    """One slide.

    kind: the first word of `show`; `tall picture` if words fit beside it. title, words, shown and
    notes are HTML; shown is what comes from the cell. minutes: for speaking; timer: for an exercise, 0 if
    there is none. live: choices of the live page, or nothing."""

    kind: str
    title: str
    words: str = ""
    shown: str = ""
    notes: str = ""
    minutes: int = 1
    timer: int = 0
    live: str = ""


def deck(notebook) -> list[Slide]:
    """The slides of a chapter, in the order of its cells; ValueError for an entry that says too little or too
    much."""
    made = []
    for cell in notebook.cells:
        for given in cell.metadata.get("slides", []):
            try:
                made.append(slide(cell, given))
            except ValueError as error:
                raise ValueError(
                    f"{title(notebook)}, cell {cell.id}, {given.get('title')!r}: {error}"
                ) from error
    return made


def slide(cell, given: dict) -> Slide:
    """The slide that one entry of a cell's metadata describes."""
    if unknown := sorted(set(given) - set(FIELDS)):
        raise ValueError(f"unknown {', '.join(unknown)}; a slide has {', '.join(FIELDS)}")
    kind, _, which = given.get("show", "").partition(" ")
    if kind not in SHOWS:
        raise ValueError(f"show={kind!r}: expected one of {', '.join(filter(None, SHOWS))}")
    heading, words, timer = given.get("title", ""), given.get("words", []), 0
    if kind == "exercise":
        task = EXERCISE.search(cell.source)
        if task is None:
            raise ValueError("the cell has no heading `## Exercise ... (N minutes`")
        heading, timer = heading or task[1], int(task[2])
    if kind == "title":
        heading = cell.source.splitlines()[0].removeprefix("# ")
    if not heading:
        raise ValueError("a slide needs a `title`")
    if kind == "picture":
        about = pictures(cell)[int(which or 1) - 1][1]
        words = words or [about["alt"]]
    return Slide(
        kind="tall picture"
        if kind == "picture" and about["width"] < TALL * about["height"]
        else kind or "words",
        title=inline(heading),
        words=html(words),
        shown=SHOWS[kind](cell, which, given),
        notes=notes(cell, given),
        minutes=given.get("minutes", 1),
        timer=timer,
        live=given.get("live", ""),
    )


def html(paragraphs: list[str]) -> str:
    """Markdown paragraphs as HTML, formulas as MathML."""
    return markdown2html(formulas("\n\n".join(paragraphs))).strip()


def inline(text: str) -> str:
    """One line of Markdown as HTML, without a paragraph around it."""
    return re.sub(r"^<p>|</p>$", "", html([re.sub(r"^(\d+)\. ", r"\1\. ", text)]))  # 3. is no list here


def notes(cell, given: dict) -> str:
    """What the speaker's window shows: what to say, and answers to expect."""
    right = given.get("answer", "").partition(".")[0]
    folds = FOLD.findall(cell.source) if given.get("show") == "vote" else []
    expected = [f"“{what}” {' '.join(why.split())}" for what, why in folds if what.partition(".")[0] != right]
    expected = [text.replace(" Run the next cell.", "") for text in expected] + given.get("wrong", [])
    listed = "".join(f"<li>{inline(text)}</li>" for text in expected)
    return html([given.get("say", "")]) + (
        f"<h2>Wrong answers to expect</h2><ul>{listed}</ul>" if listed else ""
    )


def _nothing(cell, which: str, given: dict) -> str:
    return ""


def _drawing(cell, which: str, given: dict) -> str:
    """The drawing that the cell's Markdown names, inside the page."""
    found = re.search(r"!\[(.+?)\]\(drawings/([\w.-]+)\)", cell.source, re.S)
    if found is None:
        raise ValueError("the cell has no drawing")
    return _image("svg+xml", base64.b64encode((DRAWINGS / found[2]).read_bytes()).decode(), found[1])


def _image(kind: str, data: str, alt: str, letters: float = 0) -> str:
    """letters: the height of a picture's smallest letters as a share of its width, for checks of the
    slide."""
    told = f' data-letters="{letters:.4f}"' if letters else ""
    return f'<img src="data:image/{kind};base64,{data}" alt="{escape(alt)}"{told}>'


def pictures(cell) -> list[tuple[str, dict]]:
    """The pictures that a cell has drawn: (data, {alt, width, height, letters}). Raises ValueError if there
    is none."""
    drawn = [out for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    if not drawn:
        raise ValueError("the cell has drawn no picture")
    return [(out.data["image/png"].replace("\n", ""), out.metadata["image/png"]) for out in drawn]


def _picture(cell, which: str, given: dict) -> str:
    data, about = pictures(cell)[int(which or 1) - 1]
    return _image("png", data, about["alt"], about["letters"] / about["width"])


def _formula(cell, which: str, given: dict) -> str:
    """The cell's n-th displayed formula, or its n-th inline formula if none is displayed."""
    found = re.findall(r"\$\$(.+?)\$\$", cell.source, re.S) or re.findall(r"\$([^$]+)\$", cell.source)
    if len(found) < int(which or 1):
        raise ValueError(f"the cell has {len(found)} formulas")
    parts = re.split(r",?\s*\\qquad\s*|,?\s*\\quad\s*", found[int(which or 1) - 1].strip())
    return formulas("\n\n".join(f"$${part.rstrip(' .,')}$$" for part in parts))


def lines(text: str, which: str) -> list[str]:
    """Lines of a text by number, from 1, such as `1-3,6`; all lines if no number is given."""
    rows = text.rstrip("\n").split("\n")
    if not which:
        return rows
    ends = [[int(end) for end in part.split("-")] for part in which.split(",")]
    numbers = [n for end in ends for n in range(end[0], end[-1] + 1)]
    if max(numbers) > len(rows):
        raise ValueError(f"lines {which}: there are {len(rows)}")
    return [rows[n - 1] for n in numbers]


def _pre(rows: list[str]) -> str:
    """Lines in a fixed-width font, as large as the longest line and the number of lines allow."""
    indent = min((len(row) - len(row.lstrip()) for row in rows if row.strip()), default=0)
    rows = [row[indent:].rstrip() for row in rows]
    longest = max(map(len, rows))
    if longest > COLUMNS:
        raise ValueError(f"a line of {longest} characters, and {COLUMNS} find room: {max(rows, key=len)!r}")
    size = min(44, int(24 * COLUMNS / longest), int(400 / 1.4 / len(rows)))
    return f'<pre style="font-size: {max(24, size)}px">{escape(chr(10).join(rows))}</pre>'


def _output(cell, which: str, given: dict) -> str:
    """Lines that the cell has printed, with narrowed tables and wrapped sentences."""
    printed = "".join(out.text for out in cell.get("outputs", []) if out.output_type == "stream")
    rows = squeeze("\n".join(lines(printed, which))).split("\n")
    return _pre(
        [part for row in rows for part in ([row] if in_columns(row) else textwrap.wrap(row, COLUMNS))]
    )


def _code(cell, which: str, given: dict) -> str:
    return _pre(lines(cell.source, which))


def _table(cell, which: str, given: dict) -> str:
    """The cell's table, as HTML."""
    rows = re.findall(r"(?m)^\|.*\|$", cell.source)
    if not rows:
        raise ValueError("the cell has no table")
    return markdown2html(formulas("\n".join(rows)))


def _choices(cell, which: str, given: dict) -> str:
    """The choices. A second step marks the right one and gives the reason."""
    found = CHOICE.findall("\n".join(given["choice"]) if "choice" in given else FOLDS.sub("", cell.source))
    right, _, because = given.get("answer", "").partition(". ")
    if right and right not in [label for label, _ in found]:
        raise ValueError(f"answer={right!r} is none of the choices {', '.join(label for label, _ in found)}")
    items = []
    for label, text in found:
        mark = '<span class="mark fragment" data-fragment-index="0">✓</span>' if label == right else ""
        items.append(f"<li><b>{label}</b><span>{inline(text)}</span>{mark}</li>")
    told = f'<p class="because fragment" data-fragment-index="0">{inline(because)}</p>' if right else ""
    return f'<ul class="choices">{"".join(items)}</ul>{told}' if items else ""


def _vote(cell, which: str, given: dict) -> str:
    if "answer" not in given:
        raise ValueError("a vote needs the `answer`")
    return _choices(cell, which, given)


def _exercise(cell, which: str, given: dict) -> str:
    """The choices of an exercise, if it has any."""
    return _choices(cell, which, given) if "choice" in given else ""


SHOWS = {
    "": _nothing, "title": _nothing, "drawing": _drawing, "formula": _formula, "picture": _picture,
    "output": _output, "code": _code, "table": _table, "vote": _vote, "exercise": _exercise,
    "point": _nothing,
}  # fmt: skip


STORY = Slide(
    kind="story",
    title="A contract, a GPU and clause 17",
    notes="<p>It plays by itself for 90 seconds. Read its sentences aloud, or pause it and explain.</p>",
    minutes=0,
)


def order(text: str) -> list[tuple[int, list[str], int, str]]:
    """(chapter, titles of the slides, minutes, what is said) of every part of a talk that has slides."""
    parts = re.findall(r"(?ms)^## \d+\. Chapter (\d+): (.+?) \((\d+) minutes?\)$\n+(.*?)(?=^## |\Z)", text)
    return [
        (int(chapter), titles.split(" + "), int(minutes), said) for chapter, titles, minutes, said in parts
    ]


def talk(notebooks: list, text: str) -> list[Slide]:
    """The slides that a talk names, in its order. Raises ValueError if no slide has that title."""
    books = {int(title(notebook).partition(".")[0]): notebook for notebook in notebooks}
    chapters = {chapter: deck(books[chapter]) for chapter, *_ in order(text)}
    made = []
    for chapter, titles, minutes, said in order(text):
        for number, named in enumerate(titles):
            found = [one for one in chapters[chapter] if one.title == inline(named)]
            if not found:
                raise ValueError(f"chapter {chapter} has no slide {named!r}")
            told = html([said]) if number == 0 else f"<p>Still: {escape(titles[0])}</p>"
            made.append(replace(found[0], notes=told, minutes=minutes if number == 0 else 0))
    opening = re.search(r"(?m)^\*(.+?)\*", text) or re.match(r"# (.+)", text)
    heading = html([re.match(r"# (.+)", text)[1]])
    first = replace(made[0], title=inline(opening[1]), words=heading)  # opens the talk, not a chapter
    return [first, replace(STORY, shown=_moving(DRAWINGS / "story.svg")), *made[1:]]


def _moving(path: Path) -> str:
    """A picture with its own script, which would not run inside an image tag."""
    data = base64.b64encode(path.read_bytes()).decode()
    file = f"data:image/svg+xml;base64,{data}"
    return f'<object type="image/svg+xml" data="{file}" aria-label="{escape(STORY.title)}"></object>'


def page(made: list[Slide], name: str, live: str = "page.html", paper: bool = False) -> str:
    """A deck as one HTML page. live: the relative path of the live page. paper: for print, with each slide on
    a sheet and a vote on two."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True)
    own = {path: (HERE / path).read_text(encoding="utf-8") for path in (
        "reveal/reveal.js", "reveal/reveal.css", "slides.js",
    )}  # fmt: skip
    template = environment.get_template("slides.html.j2")
    return template.render(slides=made, name=name, live=live, paper=paper, own=own, wide=WIDE, high=HIGH)


def write(paths: list[Path], out: Path, live: str | None = None, printed: bool = False) -> list[Path]:
    """Write the slides of every chapter that has some, and of the talk if all its chapters are among them;
    returns the files. live: the relative path of the live page; by default a copy is put beside the slides.
    printed: also as PDF."""
    out.mkdir(parents=True, exist_ok=True)
    if live is None:
        shutil.copy(built(), out)
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    decks = {path.stem: (title(book), deck(book)) for path, book in zip(paths, notebooks)}
    text = TALK.read_text(encoding="utf-8")
    if {chapter for chapter, *_ in order(text)} <= {int(title(book).partition(".")[0]) for book in notebooks}:
        decks["talk"] = re.match(r"# (.+)", text)[1], talk(notebooks, text)
    made = []
    for stem, (name, slides) in decks.items():
        if not slides:
            continue
        made.append(out / f"{stem}.html")
        made[-1].write_text(page(slides, name, live or "page.html"), encoding="utf-8")
        if printed:
            made.append(pdf.write(page(slides, name, paper=True), out / f"{stem}.pdf"))
    return made
