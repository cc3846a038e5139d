"""What learners answer (`planted`): right answers are accepted, planted mistakes told."""

import inspect
import math
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from course.teaching.check.exercise import CORRECT, EXERCISES, INCORRECT, Choice

sys.path.insert(0, str(Path(__file__).parent))
import planted
from planted import drawn

FUNCTIONS = {name: one for name, one in EXERCISES.items() if not isinstance(one, Choice)}
RIGHT, ROWS = planted.read()


def answer(name: str, body: str):
    """A function with the exercise's parameters and this body."""
    parameters = ", ".join(inspect.signature(FUNCTIONS[name].right).parameters)
    scope = {"torch": torch, "np": np, "math": math, "norm": norm}
    exec(f"def {name}({parameters}):\n{textwrap.indent(body, '    ')}", scope)
    return scope[name]


def norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * gain


@pytest.mark.parametrize("name, body", [(name, body) for name, bodies in RIGHT.items() for body in bodies])
def test_a_right_answer_written_differently_is_accepted(name, body):
    verdict = FUNCTIONS[name].verdict(answer(name, body), drawn(name))
    assert verdict.state == CORRECT
    assert verdict.message.partition(". Yours is a ")[0] == FUNCTIONS[name].praise


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.exercise}-{ROWS.index(row)}")
def test_a_planted_mistake_is_told_its_sentence(row):
    wanted = ".*".join(map(re.escape, row.sentence.split("…")))
    verdict = FUNCTIONS[row.exercise].verdict(answer(row.exercise, row.code), drawn(row.exercise))
    assert verdict.state == INCORRECT and re.fullmatch(wanted, verdict.message, re.S), verdict


def test_twelve_mistakes_are_planted_in_each_exercise_and_nine_of_ten_are_named():
    assert min(Counter(row.exercise for row in ROWS).values()) >= 12 and {*RIGHT} == {*FUNCTIONS}
    tells = Counter(row.tells for row in ROWS)
    assert not [row for row in ROWS if row.judged == "!"]
    assert tells["n"] >= 0.9 * len(ROWS) and tells["w"] <= len(ROWS) / 100, tells
    again = "make it again: python tests/course/teaching/planted.py"
    assert planted.PAGE.read_text(encoding="utf-8") == planted.page(), again


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_answer_that_is_fitted_to_earlier_cases_is_rejected(name):
    cases, _, more = drawn(name)
    known = {str(case): FUNCTIONS[name].right(*case) for case in sum(more, cases)}
    one_draw = {str(case): known[str(case)] for case in cases}
    learnt, less = (lambda *given, of=of: of.get(str(given), 0) for of in (known, one_draw))
    learnt.__signature__ = less.__signature__ = inspect.signature(FUNCTIONS[name].right)
    assert FUNCTIONS[name].verdict(learnt, drawn(name)).state == CORRECT
    assert FUNCTIONS[name].verdict(learnt).state == INCORRECT
    assert FUNCTIONS[name].verdict(less, drawn(name)).state == INCORRECT
