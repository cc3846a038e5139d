"""Slides of a chapter and of the talk: the cells tagged `slide` and `subslide`, as one HTML file, offline.

nbconvert makes the sections; reveal.js 6 (MIT, its licence beside it in course/reveal) shows them. The title
cell is the first slide. A picture comes with the slide whose section it stands in. What code prints
or draws is shown without the code.
"""

from __future__ import annotations

import base64
import copy
import re
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter

from .editions import DRAWINGS, title
from .mathml import formulas

HERE = Path(__file__).resolve().parent
TALK = HERE / "instructor" / "talk.md"


def slides(notebook):
    """A notebook of the slides alone, each cell with the metadata nbconvert reads; formulas as MathML."""
    made = copy.deepcopy(notebook)
    cells, open = [], False  # open: is the section of a slide still running?
    for number, cell in enumerate(made.cells):
        tags = cell.metadata.get("tags", [])
        kind = "slide" if number == 0 else next((tag for tag in ("slide", "subslide") if tag in tags), None)
        heading = cell.cell_type == "markdown" and cell.source.startswith("#")
        open = kind is not None or (open and not heading)
        if kind is None and not (open and pictures(cell)):
            continue
        kind = kind or "subslide"  # a picture of the slide's section
        if cell.cell_type == "code":
            cell.metadata["transient"] = {"remove_source": True}
        if cell.cell_type == "markdown":
            cell.source = formulas(with_drawings(claim(cell.source) if number == 0 else cell.source))
        cell.metadata["slideshow"] = {"slide_type": kind}
        cells.append(cell)
    made.cells = cells
    made.metadata["title"] = title(notebook)
    return made


def claim(source: str) -> str:
    """Of a chapter's first cell what a title slide has room for: the title, the claim, the drawing."""
    blocks = source.split("\n\n")
    return "\n\n".join(block for block in blocks if block.startswith(("#", "**", "![")))


def with_drawings(source: str) -> str:
    """Markdown with the course's drawings inside it, since slides are one file."""

    def inside(found):
        data = base64.b64encode((DRAWINGS / found[1]).read_bytes()).decode()
        return f"](data:image/svg+xml;base64,{data})"

    return re.sub(r"\]\(drawings/([\w.]+)\)", inside, source)


def pictures(cell) -> list:
    """The outputs of a cell that are pictures."""
    return [out for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]


def order(text: str) -> list[tuple[int, str, int]]:
    """(chapter, title of the slide, minutes) of every slide that a talk names, in its order."""
    named = re.findall(r"(?m)^## \d+\. Chapter (\d+): (.+) \((\d+) minutes?\)$", text)
    return [(int(chapter), heading, int(minutes)) for chapter, heading, minutes in named]


def talk(notebooks: list, text: str):
    """A notebook of the slides that a talk names, in its order, each with its pictures; ValueError where
    there is none of that title."""
    chapters = {int(title(notebook).partition(".")[0]): slides(notebook) for notebook in notebooks}
    made, cells = None, []
    for chapter, heading, _ in order(text):
        made, group = made or copy.deepcopy(chapters[chapter]), []
        for cell in chapters[chapter].cells:
            opens = cell.metadata["slideshow"]["slide_type"] == "slide"
            if opens and group:
                break
            if group or (opens and cell.source.splitlines()[0].lstrip("# ") == heading):
                group.append(copy.deepcopy(cell))
        if not group:
            raise ValueError(f"chapter {chapter} has no slide {heading!r}")
        if not cells:  # the first slide opens the talk, not a chapter
            said = re.search(r"(?m)^\*(.+?)\*", text) or re.match(r"# (.+)", text)
            group[0].source = "\n".join([f"# {said[1]}", *group[0].source.splitlines()[1:]])
        cells += group
    for number, cell in enumerate(cells):
        cell.id = f"talk{number}"
    made.cells, made.metadata["title"] = cells, re.match(r"# (.+)", text)[1]
    return made


def page(notebook) -> str:
    """The page of a chapter's slides."""
    return html(slides(notebook))


def html(made) -> str:
    """A notebook of slides as one page of HTML."""
    exporter = SlidesExporter(template_file=str(HERE / "slides.html.j2"))
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    own = {name: (HERE / "reveal" / name).read_text(encoding="utf-8") for name in ("reveal.js", "reveal.css")}
    return exporter.from_notebook_node(made, {"vendored": own})[0]


def write(paths: list[Path], out: Path) -> list[Path]:
    """Write the slides of every chapter that has tagged cells, and of the talk if all its chapters are among
    them; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    made, notebooks = [], [nbformat.read(path, as_version=4) for path in paths]
    for path, notebook in zip(paths, notebooks):
        if len(slides(notebook).cells) < 2:
            continue
        made.append(out / f"{path.stem}.html")
        made[-1].write_text(page(notebook), encoding="utf-8")
    text = TALK.read_text(encoding="utf-8")
    there = {int(title(notebook).partition(".")[0]) for notebook in notebooks}
    if {chapter for chapter, *_ in order(text)} <= there:
        made.append(out / "talk.html")
        made[-1].write_text(html(talk(notebooks, text)), encoding="utf-8")
    return made
