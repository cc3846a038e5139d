"""The checks of the exercises: they accept the solution and name the mistake in typical wrong answers.

What learners answer, written independently of the checks, is in `test_answers.py`.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch

from course.teaching import check
from course.teaching.check import key
from course.teaching.check.exercise import (
    CORRECT,
    EXERCISES,
    INCORRECT,
    NOT_ATTEMPTED,
    Choice,
    Exercise,
    Verdict,
)

sys.path.insert(0, str(Path(__file__).parent))
from planted import drawn

ALL = {name: getattr(check, name) for name in EXERCISES}
FUNCTIONS = {name: one for name, one in ALL.items() if isinstance(one, Exercise)}
CHOICES = {name: one for name, one in ALL.items() if isinstance(one, Choice)}
MISTAKES = [(name, *mistake) for name, one in FUNCTIONS.items() for mistake in one.mistakes]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_solution_is_accepted_and_eight_mistakes_are_known(name):
    assert FUNCTIONS[name].verdict(FUNCTIONS[name].right).state == CORRECT
    assert len(drawn(name)[1]) == len(FUNCTIONS[name].mistakes)  # each of them shows in the cases
    assert len(FUNCTIONS[name].mistakes) >= 8


@pytest.mark.parametrize("name, sentence, wrong", MISTAKES)
def test_a_typical_wrong_answer_is_rejected_with_its_own_message(name, sentence, wrong):
    # another function: the planted bug itself is "not attempted"
    assert FUNCTIONS[name].verdict(lambda *given: wrong(*given), drawn(name)) == Verdict(INCORRECT, sentence)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stub_is_not_attempted(name):
    arguments = inspect.signature(FUNCTIONS[name].right).parameters

    def raises(*given):
        raise NotImplementedError

    assert arguments
    stubs = (..., None, lambda *given: None, lambda *given: ..., raises, FUNCTIONS[name].given or ...)
    for stub in stubs:
        assert FUNCTIONS[name].verdict(stub, drawn(name)) == Verdict(NOT_ATTEMPTED)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_answer_that_fails_or_is_something_else_is_explained(name):
    def breaks(*given):
        x = torch.ones(2, 3)
        raise KeyError(f"oops{len(x)}")

    said = (
        """KeyError: 'oops2' in `raise KeyError(f"oops{len(x)}")`, where x is [2, 3]; a dict has no entry"""
    )
    breaks.__signature__ = inspect.signature(FUNCTIONS[name].right)  # else every exercise asks for itself
    assert said in FUNCTIONS[name].verdict(breaks, drawn(name)).message
    assert FUNCTIONS[name].verdict(7, drawn(name)) == Verdict(
        INCORRECT, "expected a function, got int: hand over the function itself, not what it returns"
    )
    something = lambda *given: "something"
    something.__signature__ = breaks.__signature__
    assert FUNCTIONS[name].verdict(something, drawn(name)).state == INCORRECT


@pytest.mark.parametrize(
    "line, said",
    [
        ("torch.ones(1, 2, 3)[torch.ones(2, 3).bool()]", "as an index a mask needs the shape of the tensor"),
        ("x[:, -9]", "an index is beyond the ends"),
        ("[].pop()", "something was empty"),
        ("x.topk(-1)", "or for fewer than none"),
        ("x.softmax()", "the call lacks an argument"),
        ("x.append(1)", "a tensor has nothing of this name"),
        ("None.shape", "something is None here"),
        ("torch.cat(x, x)", "take the tensors in a list"),
    ],
)
def test_what_is_said_of_an_error_is_true_of_it(line, said):
    breaks = eval(f"lambda held, new: (lambda x: {line})(torch.ones(2, 3))", {"torch": torch})
    assert said in FUNCTIONS["next_position"].verdict(breaks).message


def test_one_of_several_things_is_told_by_its_number():
    made = Exercise("several", lambda x: [x, x[:1]], lambda draw: [(torch.ones(2),)], [], "")
    EXERCISES.pop("several")
    verdict = made.verdict(lambda x: [x, torch.tensor([5.0])])
    assert "of the 2 things that you return number 2 is wrong: test 1 of 1" in verdict.message


def test_a_number_that_is_almost_right_is_not_one_times_the_right_one(capsys):
    check.measured(28.999, 29)
    assert capsys.readouterr().out == "incorrect: your 29 is near, and it must be exact\n"


def test_several_numbers_are_compared_one_by_one(capsys):
    for yours, said in (
        ([6] + [1] * 23, "correct: you say 24 numbers, and all of them are right"),
        ([1] * 23 + [6], "incorrect: 2 of 24 numbers are wrong, the first at [0]: it is 1, expected 6"),
        (29, "incorrect: 24 numbers of shape [24] are expected"),
        (..., "not attempted"),
    ):
        check.measured(yours, "fed_with_cache")
        assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_accepts_one_letter_and_says_why_the_others_are_wrong(name):
    one = CHOICES[name]
    assert len(one.why) >= 3 and len(set(one.why.values())) == len(one.why)
    for letter, why in one.why.items():
        wanted = CORRECT if letter == one.right else INCORRECT
        assert one.verdict(letter) == one.verdict(f" {letter.upper()} ") == Verdict(wanted, why)
    assert one.verdict(...) == Verdict(NOT_ATTEMPTED)
    assert "none of" in one.verdict("z").message


def test_the_key_is_what_the_sources_say():
    assert key.read() == key.make(), "run: python course/teaching/check/key.py"


@pytest.mark.parametrize("name", ALL)
def test_hints_come_one_by_one_and_a_solution_after_an_attempt(name, capsys, monkeypatch):
    monkeypatch.setattr(check, "ATTEMPTED", set())
    monkeypatch.setitem(check._steps, name, 0)
    hints = check.HELP[name]["hints"]
    assert len(hints) == len(set(hints)) == 3
    for number in (1, 2, 3, 3):
        check.hint(name)
        assert capsys.readouterr().out.startswith(f"hint {number} of 3: {hints[number - 1]}")
    check.solution(name)
    assert capsys.readouterr().out == f"try it first: check.{name}(your answer)\n"
    check.ATTEMPTED.add(name)
    check.solution(name)
    assert check.HELP[name]["solution"] in capsys.readouterr().out


@pytest.mark.parametrize("name, replies", check.QUESTIONS.items())
def test_a_question_keeps_a_choice_and_answers_words(name, replies, capsys):
    for nothing in (..., None, "", "  "):
        check.question(name, nothing)
        assert capsys.readouterr().out == "not attempted\n"
    if len(replies) == 1:
        check.question(name, "I think it is four.")
        assert capsys.readouterr().out == f"to compare with yours: {replies['Answer']}\n"
        return
    for number, choice in enumerate(replies, 1):
        for written in (number, str(number), f" ({number}). "):
            check.question(name, written)
            assert capsys.readouterr().out == f"kept: you say {choice}. A later cell answers.\n"
    check.question(name, len(replies) + 1)
    assert "is none of the proposals: write one of 1, 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", check.NUMBERS)
def test_what_is_measured_is_not_attempted_correct_or_incorrect(name, capsys):
    """Numbers, and whole pictures and lists, of which every number counts."""
    right = check.NUMBERS[name]
    wrong = ~right if getattr(right, "dtype", None) == torch.bool else right + 7
    for yours, says in (
        (..., "not attempted"),
        (None, "not attempted"),
        (right, "correct"),
        (wrong, "incorrect"),
    ):
        check.measured(yours, name)
        assert capsys.readouterr().out.startswith(says)
