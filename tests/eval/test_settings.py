"""What tasks are told, and what they are not, is refused in one line that says what is expected."""

import json
import random

import numpy as np
import pytest

from eval.accuracy import taskset
from eval.core.errors import Problem

DRAWN = """task: drawn
custom_dataset: !function rows.drawn
output_type: multiple_choice
test_split: test
doc_to_text: "{{facts}}"
doc_to_choice: choices
doc_to_target: 0
"""
ROWS = """import random

import datasets
import numpy as np


def drawn(**kwargs):
    rows = [{"facts": f"{random.random()} {np.random.rand()}", "choices": ["a", "b"]}]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})
"""


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


def test_rows_that_are_drawn_at_random_are_the_same_in_every_process(tmp_path):
    """As RULER's: a run that is resumed asks its methods of the same documents."""
    (tmp_path / "drawn.yaml").write_text(DRAWN)
    (tmp_path / "rows.py").write_text(ROWS)
    found, states = set(), set()
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        task = taskset.load("drawn", taskset.Sources(include=(str(tmp_path),)))["drawn"]
        found.add(task.test_docs()[0]["facts"])
        states.add((random.random(), np.random.rand()))
    assert len(found) == 1 and len(states) == 2, "and what others draw goes on"
