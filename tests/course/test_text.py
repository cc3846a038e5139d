"""Notebooks as text, and back."""

from __future__ import annotations

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


def test_the_way_there_and_back_changes_nothing():
    once = text.to_text(text.to_notebook(CHAPTER))
    assert once == CHAPTER
    assert text.to_text(text.to_notebook(once)) == once
