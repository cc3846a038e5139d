"""Learner and instructor editions. What is handed out: kit/test_pack.py."""

import copy
import math
import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import torch

from course import editions
from course.teaching import check
from course.teaching.check.key import exercise_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize(
    "wrong",
    ["### BEGIN SOLUTION\nx", "### END SOLUTION", "### INSTEAD", "### BEGIN SOLUTION\n### BEGIN SOLUTION"],
)
def test_marks_that_do_not_match_are_refused(wrong):
    with pytest.raises(ValueError, match=r"SOLUTION|INSTEAD"):
        editions.open_gaps(wrong)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_the_learners_chapter_is_empty_and_says_where_hints_and_solutions_are(path):
    """That no answer is in it: kit/test_pack.py."""
    source, chapter = nbformat.read(path, as_version=4), int(path.name[:2])
    before = copy.deepcopy(source)
    made = editions.learner(source)
    nbformat.validate(made)
    assert source == before
    assert {*made.metadata} <= {"kernelspec", "language_info"}  # and nothing that instructors noted
    assert not any(cell.metadata for cell in made.cells)
    assert all(not cell.outputs and cell.execution_count is None for cell in made.cells if "outputs" in cell)
    text = "\n".join(cell.source for cell in made.cells)
    assert not re.search("<details|BEGIN SOLUTION|INSTEAD", text)
    for name in (exercise_of(cell.source) for cell in source.cells if editions.BEGIN in cell.source):
        assert not name or (f'check.hint("{name}")' in text and f'check.solution("{name}")' in text)
    asked = re.findall(r'check\.question\("([\d.]+)", \.\.\.', text)
    assert asked == [f"{chapter}.{number}" for number in range(1, len(asked) + 1)] != []


def test_what_a_learner_works_in_is_never_written_over(tmp_path):
    source, folder = Path(shutil.copy(CHAPTERS[3], tmp_path)), tmp_path / "lab"
    assert editions.lay_out([source], folder) == []
    work = folder / source.name
    assert "check.hint" in work.read_text() and editions.BEGIN not in work.read_text()
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
