"""What tasks are told, and what they are not, is refused in one line that says what is expected."""

from __future__ import annotations

import json

import pytest

from eval.accuracy import taskset
from eval.core.errors import Problem


def needles(folder, **told):
    about = {"tokenizer": str(folder)} | told
    return taskset.load("needles_single", taskset.Sources(metadata=json.dumps(about)))["needles_single"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"lengths": "many"}, "lengths='many': expected tokens"),
        ({"lengths": []}, "lengths=[]: expected tokens"),
        ({"lengths": [256, "x"]}, "expected tokens of a document, as a list"),
        ({"lengths": [12]}, "12 tokens are too few"),
        ({"documents": "some"}, "documents='some': expected a number"),
        ({"documents": 0}, "documents=0: expected a number"),
    ],
)
def test_lengths_and_documents(folder, told, said):
    with pytest.raises(Problem) as error:
        needles(folder, **told)
    assert said in str(error.value) and "\n" not in str(error.value)
