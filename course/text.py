"""A notebook as plain text and back: what one writes a chapter in.

    ---
    teach: 50
    exercises: 30
    ---
    # 5. Eviction
    +++ #predict slide
    A new Markdown cell; `#predict` names it, other words are its tags.
    ```{code} #reveal nbval-ignore-output
    print("a code cell")
    ```
    ```{slide}
    title: What the cell above shows
    ```
    ```{setup}
    ```

`+++` starts a Markdown cell, so does the text after a code cell. The head becomes the notebook's metadata
`course`. `{setup}` stands for the cell `SETUP`, the same in every chapter. `{slide}` is a slide of the cell
before it (course/slides.py says what one has; a long line goes on after two blanks). Cells without a name
are called c00, c01, ... Outputs are not part of the text.

Why not jupytext: its formats (tried: MyST and percent of 1.19.6) carry tags and, when told to, the metadata
`course`, but no cell ids, so a chapter written as text could not name its cells.
"""

from __future__ import annotations

import re
import textwrap

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SETUP = """\
# Runs everywhere: does nothing where kvlab is installed, else installs it (KVLAB_SOURCE: folder or address).
import importlib.util
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in this course needs a network
warnings.filterwarnings("ignore", message="IProgress not found")  # nor widgets
if importlib.util.find_spec("kvlab") is None:
    source = os.environ.get("KVLAB_SOURCE", "..")
    wanted = f"kvlab[course] @ {source}" if "://" in source else f"{source}[course]"
    %pip install -q "{wanted}"
if importlib.util.find_spec("course") is None:  # installed: kvlab_course, and kvlab_eval for eval
    for name in ("course", "eval"):
        sys.modules[name] = importlib.import_module(f"kvlab_{name}")"""
FENCE = re.compile(r"```\{(code|setup|slide)\}\s*(.*)")
SEVERAL = ("words", "choice", "wrong")  # what a slide may say more than once


def to_notebook(text: str) -> nbformat.NotebookNode:
    """The notebook that a text describes, without outputs. ValueError for a code cell that does not end."""
    head, body = _head(text)
    cells, kind, words, lines = [], "markdown", "", []

    def close():
        source = "\n".join(lines).strip("\n") if kind == "code" else "\n".join(lines).strip()
        if kind == "setup":
            source = SETUP
        if kind == "slide":
            _give_slide(cells, lines)
        elif source:
            cells.append(_cell(kind, words, source, len(cells)))

    for line in body.splitlines():
        fence = FENCE.fullmatch(line.strip()) if kind == "markdown" else None
        if fence:
            close()
            kind, words, lines = fence[1], fence[2], []
        elif kind != "markdown" and line == "```":
            close()
            kind, words, lines = "markdown", "", []
        elif kind == "markdown" and (line == "+++" or line.startswith("+++ ")):
            close()
            words, lines = line[3:], []
        else:
            lines.append(line)
    if kind != "markdown":
        raise ValueError(f"the {kind} cell {words!r} has no closing ```")
    close()
    names = [cell.id for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two cells are called {', '.join(twice)}")
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"course": head, "kernelspec": python, "language_info": {"name": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


def to_text(notebook: nbformat.NotebookNode) -> str:
    """The text that describes a notebook: the inverse of `to_notebook`."""
    head = notebook.metadata.get("course", {})
    parts = ["---", *(f"{key}: {value}" for key, value in head.items()), "---"]
    after_markdown = False
    for cell in notebook.cells:
        named = [] if re.fullmatch(r"c\d+", cell.id) else [f"#{cell.id}"]
        slides = cell.metadata.get("slides", [])
        left = ("setup", "slide") if slides else ("setup",)
        words = " ".join(named + [t for t in cell.metadata.get("tags", []) if t not in left])
        if cell.cell_type == "markdown":
            if after_markdown or words:
                parts.append(f"+++ {words}".rstrip())
            parts.append(cell.source)
        elif cell.source == SETUP:
            parts += [f"```{{setup}} {words}".rstrip(), "```"]
        else:
            parts += [f"```{{code}} {words}".rstrip(), cell.source, "```"]
        for slide in slides:
            parts += ["```{slide}", *_slide_lines(slide), "```"]
        after_markdown = cell.cell_type == "markdown"
    return "\n".join(parts) + "\n"


def keep_outputs(made: nbformat.NotebookNode, before: nbformat.NotebookNode) -> bool:
    """Give `made` the outputs of `before` where only prose has changed; returns whether it has."""
    new, old = ([cell for cell in book.cells if cell.cell_type == "code"] for book in (made, before))
    if [cell.source for cell in new] != [cell.source for cell in old]:
        return False
    for one, other in zip(new, old):
        one.outputs, one.execution_count = other.outputs, other.execution_count
    return True


def _cell(kind: str, words: str, source: str, count: int):
    names = [word[1:] for word in words.split() if word.startswith("#")]
    tags = [word for word in words.split() if not word.startswith("#")]
    if kind == "setup":
        tags.append("setup")
    make = new_markdown_cell if kind == "markdown" else new_code_cell
    metadata = {"tags": tags} if tags else {}
    return make(source, id=names[0] if names else f"c{count:02}", metadata=metadata)


def _give_slide(cells: list, lines: list[str]) -> None:
    """Give the last cell the slide that these lines describe. ValueError for a line without a key."""
    slide = {}
    for line in re.sub(r"\n  +", " ", "\n".join(lines)).splitlines():
        key, colon, value = line.partition(": ")
        if not colon or not cells:
            raise ValueError(f"a slide comes after its cell and has lines `key: value`, not {line!r}")
        if key in SEVERAL:
            slide.setdefault(key, []).append(value.strip())
        else:
            slide[key] = int(value) if key == "minutes" else value.strip()
    tags = cells[-1].metadata.setdefault("tags", [])
    cells[-1].metadata["tags"] = [*tags, *(["slide"] if "slide" not in tags else [])]
    cells[-1].metadata.setdefault("slides", []).append(slide)


def _slide_lines(slide: dict) -> list[str]:
    """The lines that describe a slide, long ones broken."""
    pairs = [(key, value) for key, held in slide.items() for value in (held if key in SEVERAL else [held])]
    told = (f"{key}: {value}" for key, value in pairs)
    wrap = textwrap.TextWrapper(110, subsequent_indent="  ", break_on_hyphens=False)
    return [part for line in told for part in wrap.wrap(line)]


def _head(text: str) -> tuple[dict, str]:
    if not text.startswith("---\n"):
        return {}, text
    head, _, body = text[4:].partition("\n---\n")
    pairs = (line.split(":", 1) for line in head.splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in pairs}
    return {key: int(value) if value.isdigit() else value for key, value in values.items()}, body
