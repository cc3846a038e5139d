"""Notebooks as text, and back."""

from __future__ import annotations

import nbformat

from course import text

CHAPTER = """---
teach: 50
exercises: 30
---
# 9. A chapter

One sentence.

```python
not_a_cell = True
```
+++
## Next
+++ #predict instructor slide
Two tags and a name.
```{setup}
```
```{code} #reveal nbval-ignore-output
print("```")

print(2)
```
```{slide}
title: What it shows
show: output 1
words: One line.
words: Another line, which is so long that it has to be broken when it is printed, since nobody can read what
  goes on for ever.
minutes: 2
wrong: "two": no.
```
The end.
"""


def test_a_text_becomes_the_cells_it_describes():
    notebook = text.to_notebook(CHAPTER)
    nbformat.validate(notebook)
    assert notebook.metadata.course == {"teach": 50, "exercises": 30}
    kinds = [(cell.cell_type, cell.id, cell.metadata.get("tags", [])) for cell in notebook.cells]
    assert kinds == [
        ("markdown", "c00", []),
        ("markdown", "c01", []),
        ("markdown", "predict", ["instructor", "slide"]),
        ("code", "c03", ["setup"]),
        ("code", "reveal", ["nbval-ignore-output", "slide"]),
        ("markdown", "c05", []),
    ]
    assert notebook.cells[0].source.endswith("not_a_cell = True\n```")
    assert notebook.cells[3].source == text.SETUP
    assert notebook.cells[4].source == 'print("```")\n\nprint(2)'
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    (slide,) = notebook.cells[4].metadata["slides"]
    assert (slide["title"], slide["show"], slide["minutes"]) == ("What it shows", "output 1", 2)
    assert slide["words"][0] == "One line." and slide["words"][1].endswith("what goes on for ever.")
    assert slide["wrong"] == ['"two": no.']


def test_the_way_there_and_back_changes_nothing():
    once = text.to_text(text.to_notebook(CHAPTER))
    assert once == CHAPTER
    assert text.to_text(text.to_notebook(once)) == once
