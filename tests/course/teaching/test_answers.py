"""Answers that learners give (`tests/answers`) get the sentence that helps them."""

from __future__ import annotations

import inspect
import math
import textwrap

import numpy as np
import pytest
import torch
from answers import RIGHT, WRONG

from course.teaching.check.exercise import CORRECT, EXERCISES, INCORRECT, Choice

pytestmark = pytest.mark.uncounted

FUNCTIONS = {name: one for name, one in EXERCISES.items() if not isinstance(one, Choice)}
CHOICES = {name: one for name, one in EXERCISES.items() if isinstance(one, Choice)}
UNNAMED = ("case 1", "case 2", "case 3", "case 4", "the results differ")  # a difference, and no mistake


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
    assert str(FUNCTIONS[name].verdict(answer(name, body))) == f"correct: {FUNCTIONS[name].praise}"


@pytest.mark.parametrize("name, body, told", [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_a_wrong_answer_is_told_its_mistake(name, body, told):
    verdict = FUNCTIONS[name].verdict(answer(name, body))
    assert verdict.state == INCORRECT and told and told in str(verdict), verdict
    assert not verdict.message.startswith(UNNAMED)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_takes_its_letter_however_it_is_written(name):
    right = CHOICES[name].right
    words = ". a method and b the window, for a conversation about c or d"
    for written in (
        right,
        f" {right.upper()} ",
        f"({right})",
        f"{right}.",
        [right],
        right + words,
        f"{right}) a {words}",
    ):
        assert CHOICES[name].verdict(written).state == CORRECT


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_has_eight_sentences_for_wrong_answers(name):
    one = CHOICES[name]
    wrong = [letter for letter in one.why if letter != one.right]
    odd = ["z", 3, ["a", "b"], "a or b", "", lambda: "a", "because it is faster"]
    verdicts = [one.verdict(given) for given in (*wrong, *odd)]
    assert all(verdict.state == INCORRECT for verdict in verdicts)
    assert len({verdict.message for verdict in verdicts}) == len(verdicts) >= 8
