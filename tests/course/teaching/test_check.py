"""The checks of the exercises: they accept the solution and name the mistake in typical wrong answers."""

from __future__ import annotations

import inspect

import pytest
import torch

from course.teaching import check
from course.teaching.check.exercise import CORRECT, INCORRECT, NOT_ATTEMPTED, Choice, Exercise, Verdict, same

ALL = {name: getattr(check, name) for name in check.__all__}
FUNCTIONS = {name: one for name, one in ALL.items() if isinstance(one, Exercise)}
CHOICES = {name: one for name, one in ALL.items() if isinstance(one, Choice)}
MISTAKES = [(name, sentence) for name, one in FUNCTIONS.items() for sentence in one.mistakes]


def test_every_check_goes_by_its_name():
    assert all(one.name == name for name, one in ALL.items())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_solution_is_accepted_and_three_mistakes_are_known(name):
    assert FUNCTIONS[name].verdict(FUNCTIONS[name].right).state == CORRECT
    assert len(FUNCTIONS[name].mistakes) >= 3


@pytest.mark.parametrize("name, sentence", MISTAKES)
def test_a_typical_wrong_answer_is_rejected_with_its_own_message(name, sentence):
    assert FUNCTIONS[name].verdict(FUNCTIONS[name].mistakes[sentence]) == Verdict(INCORRECT, sentence)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stub_is_not_attempted(name):
    arguments = inspect.signature(FUNCTIONS[name].right).parameters

    def raises(*given):
        raise NotImplementedError

    assert arguments
    for stub in (..., None, lambda *given: None, lambda *given: ..., raises):
        assert FUNCTIONS[name].verdict(stub) == Verdict(NOT_ATTEMPTED)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_answer_that_fails_or_is_something_else_is_explained(name):
    def breaks(*given):
        raise KeyError("oops")

    assert "it stops with KeyError: 'oops'" in FUNCTIONS[name].verdict(breaks).message
    assert FUNCTIONS[name].verdict(7) == Verdict(INCORRECT, "expected a function, got int")
    assert FUNCTIONS[name].verdict(lambda *given: "something").state == INCORRECT


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_accepts_one_letter_and_says_why_the_others_are_wrong(name):
    one = CHOICES[name]
    assert len(one.why) >= 3 and len(set(one.why.values())) == len(one.why)
    for letter, why in one.why.items():
        wanted = CORRECT if letter == one.right else INCORRECT
        assert one.verdict(letter) == one.verdict(f" {letter.upper()} ") == Verdict(wanted, why)
    assert one.verdict(...) == Verdict(NOT_ATTEMPTED)
    assert "none of" in one.verdict("z").message


def test_a_check_prints_one_line(capsys):
    check.append(lambda past, new: torch.cat([past, new], 2))
    check.append(...)
    check.growth("a")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [CORRECT, NOT_ATTEMPTED, INCORRECT]


def test_answers_written_independently():
    """Not the mistakes that the checks hold: other code that makes them, and code that is right."""
    import numpy as np

    assert check.append.verdict(lambda p, n: torch.stack([*p.unbind(2), *n.unbind(2)], 2)).state == CORRECT
    stale = check.append.verdict(lambda p, n: p.clone())
    assert "stale" in stale.message
    assert "does not advance" in check.next_position.verdict(lambda held, new: list(range(new))).message
    assert check.next_position.verdict(lambda held, new: np.arange(held, held + new)).state == CORRECT
    assert (
        "factor h"
        in check.decode_flops.verdict(
            lambda b, n, h, l, V: 24 * l * b * h * h + 4 * l * b * (h + n) + 2 * b * h * V
        ).message
    )
    assert (
        "newest"
        in check.sink_slots.verdict(lambda t, s, b: [*range(s), *range(t - 1 - (b - s), t - 1)]).message
    )
    assert "shape" in check.greedy.verdict(lambda x: x[:, -1:].argmax(-1)).message


def test_same_compares_what_checks_compare():
    assert same(torch.ones(2), [1, 1], 1e-5) and not same(torch.ones(2), torch.ones(3), 1e-5)
    assert same([1, 2.0], (1, 2), 1e-5) and not same([1], [1, 2], 1e-5)
    assert same(3, 3.00001, 1e-5) and not same(3, 3.1, 1e-5)
    assert not same(ValueError(), 3, 1e-5) and not same("x", 3, 1e-5)
