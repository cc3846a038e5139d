"""Slides of a chapter: the cells tagged `slide` and `subslide`, as one HTML file that needs no network.

nbconvert makes the sections; reveal.js 6 (MIT, its licence beside it in course/reveal) shows them. The title
cell is the first slide. A picture comes with the slide whose section it stands in, without its code.
"""

from __future__ import annotations

import copy
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter

from .editions import title
from .mathml import formulas

HERE = Path(__file__).resolve().parent


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
        if kind is None:  # a picture of the slide's section
            cell.metadata["transient"], kind = {"remove_source": True}, "subslide"
        if cell.cell_type == "markdown":
            cell.source = formulas(cell.source)
        cell.metadata["slideshow"] = {"slide_type": kind}
        cells.append(cell)
    made.cells = cells
    made.metadata["title"] = title(notebook)
    return made


def pictures(cell) -> list:
    """The outputs of a cell that are pictures."""
    return [out for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]


def page(notebook) -> str:
    """The slides of a chapter as one page of HTML."""
    exporter = SlidesExporter(template_file=str(HERE / "slides.html.j2"))
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    own = {name: (HERE / "reveal" / name).read_text(encoding="utf-8") for name in ("reveal.js", "reveal.css")}
    return exporter.from_notebook_node(slides(notebook), {"vendored": own})[0]


def write(paths: list[Path], out: Path) -> list[Path]:
    """Write the slides of every chapter that has tagged cells; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        if len(slides(notebook).cells) < 2:
            continue
        made.append(out / f"{path.stem}.html")
        made[-1].write_text(page(notebook), encoding="utf-8")
    return made
