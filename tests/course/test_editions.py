"""Learner and instructor editions. What is handed out: kit/test_pack.py."""

import copy
import math
import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import editions
from course.teaching import check
from course.teaching.check.key import exercise_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLVED = '''def scale(scores, d):
    """Divide by the square root of d."""
    ### BEGIN SOLUTION
    scores = scores / d**0.5
    ### INSTEAD
    # scores = scores / d
    ### END SOLUTION
    return scores'''

CHECK = """class check:
    question = print

    def scale(answer):
        print("not attempted")


print(1)"""


def chapter(number=3, teach=40, exercises=20):
    cells = [
        new_markdown_cell(f"# {number}. A chapter\n\nOne claim."),
        new_markdown_cell("## At a glance\n\n" + "x" * 300),
        new_markdown_cell("Expect the answer 7.", metadata={"tags": ["instructor"]}),
        new_markdown_cell("## Predict\n\n1. red\n2. blue\n\n"
                          "<details><summary>1. red</summary>Too warm.</details>\n"
                          "<details><summary>2. blue</summary>Quite so.</details>"),
        new_code_cell(CHECK, execution_count=1, outputs=[new_output("stream", text="1\n")],
                      metadata={"tags": ["slide"]}),
        new_markdown_cell("## Exercise 1: it (20 minutes, difficulty 1)\n\n"
                          "<details><summary>Hint 1</summary>Think.</details>\n"
                          "<details><summary>Solution</summary>Use the root.</details>"),
        new_code_cell(SOLVED + "\n\n\ncheck.scale(scale)"),
        new_markdown_cell("## Key points"),
        new_markdown_cell("## Quiz\n\n**1.** Why?\n\n<details><summary>Answer</summary>Because.</details>\n\n"
                          "**2.** When?\n\n<details><summary>Answer</summary>At noon.</details>"),
    ]  # fmt: skip
    return new_notebook(cells=cells, metadata={"course": {"teach": teach, "exercises": exercises}})


@pytest.mark.parametrize(
    "wrong",
    ["### BEGIN SOLUTION\nx", "### END SOLUTION", "### INSTEAD", "### BEGIN SOLUTION\n### BEGIN SOLUTION"],
)
def test_marks_that_do_not_match_are_refused(wrong):
    with pytest.raises(ValueError, match=r"SOLUTION|INSTEAD"):
        editions.open_gaps(wrong)


def test_the_learner_gets_no_solution_no_instructor_cell_and_no_output():
    source = chapter()
    before = copy.deepcopy(source)
    made = editions.learner(source)
    nbformat.validate(made)
    everything = "\n".join(cell.source for cell in made.cells)
    for hidden in (
        "Too warm",
        "Quite so",
        "Because",
        "noon",
        "details",
        "Use the root",
        "Think.",
        "d**0.5",
        "BEGIN SOLUTION",
        "Expect the answer",
        "INSTEAD",
    ):
        assert hidden not in everything
    assert 'check.hint("scale")' in everything and 'check.solution("scale")' in everything
    assert "scores / d\n" in everything
    questions = [cell.source for cell in made.cells if "check.question" in cell.source]
    assert [re.findall(r'"(3\.\d)", \.\.\.', source) for source in questions] == [["3.1"], ["3.2", "3.3"]]
    assert "1 or 2 in place of" in questions[0]
    assert ["import check" in source for source in questions] == [True, False]
    assert not made.metadata and not any(cell.metadata for cell in made.cells)  # nor what instructors noted
    assert all(not cell.outputs and cell.execution_count is None for cell in made.cells if "outputs" in cell)
    assert source == before


def test_what_a_learner_works_in_is_never_written_over(tmp_path):
    source, folder = tmp_path / "03_chapter.ipynb", tmp_path / "lab"
    nbformat.write(chapter(), source)
    assert editions.lay_out([source], folder) == []
    work = folder / source.name
    assert "check.hint" in work.read_text() and "d**0.5" not in work.read_text()
    assert (folder / "page.html").exists()  # chapters link to it
    work.write_text("mine")
    assert editions.lay_out([source], folder) == []
    later = work.stat().st_mtime + 60
    os.utime(source, (later, later))
    assert editions.lay_out([source], folder) == [source.name] and work.read_text() == "mine"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_an_untouched_exercise_is_not_attempted_and_a_solved_one_is_correct(path, capsys):
    for cell in nbformat.read(path, as_version=4).cells:
        if editions.BEGIN in cell.source and (name := exercise_of(cell.source)):
            for source, told in (
                (editions.open_gaps(cell.source), "not attempted"),
                (cell.source, "correct"),
            ):
                judged = re.match(rf".*?^check\.{name}\(.*?$", source, re.S | re.M)[0]  # what follows uses it
                exec(judged, {"torch": torch, "math": math, "check": check})
                assert capsys.readouterr().out.startswith(told), cell.id
