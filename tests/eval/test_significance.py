"""Which two methods differ: McNemar's test of every pair, Holm's correction, and `--against`."""

import random

import pytest
from stored import reported, store_of

from eval.core.errors import Problem
from eval.report import significance, tables
from eval.report.statistics import mcnemar

from .test_statistics import cell

CELLS = [cell("full", 38), cell("snapkv:budget=0.2", 30), cell("h2o:budget=0.2", 10), cell("int4", 37)]


@pytest.mark.parametrize("seed", range(6))
def test_holm_steps_down(seed):
    """By its definition: p is refused while all smaller ones are, each at the level over those left."""
    chance = random.Random(seed)
    found = [
        chance.choice([chance.random(), chance.random() / 100, 0.01]) for _ in range(chance.randint(1, 9))
    ]
    corrected = significance.holm(found)
    for level in (0.01, 0.05, 0.3, 0.999):
        refused = 0
        for p in sorted(found):
            if p > level / (len(found) - refused) * (1 + 1e-12):
                break
            refused += 1
        assert sum(p <= level * (1 + 1e-12) for p in corrected) == refused
    assert all(p >= raw for p, raw in zip(corrected, found, strict=True))


def test_every_two_methods_are_compared_once():
    (board,) = tables.boards(CELLS)
    head, body = significance.matrix(board, "recall")
    assert head == ["method", "1", "2", "3", "4"] and [len(line) for line in body] == [5] * 4
    values = {one["method"]: one["values"]["acc"] for one in CELLS}
    tested = significance.pairs(values)
    assert len(tested) == 6
    for (a, b), (lost, won, p) in tested.items():
        raw = mcnemar(values[a], values[b])
        assert (lost, won) == raw[:2] and p >= raw[2]
    place = {line[0].split()[1]: index for index, line in enumerate(body)}
    assert body[place["full"]][1 + place["h2o:budget=0.2"]] == "−0 +28*"
    assert body[place["h2o:budget=0.2"]][1 + place["full"]].endswith("*")
    assert all(line[index] == "" for index, line in enumerate(body, 1))


def test_another_method_is_the_reference(tmp_path):
    store = store_of(tmp_path, CELLS)
    printed, *_ = reported(store, against="snapkv")
    assert "* differs from snapkv:budget=0.2 by more than noise, each pair by itself." in printed
    (board,) = tables.boards(CELLS, against="snapkv:budget=0.2")
    told = {row["method"]: (row["lost"], row["won"], row["differs"]) for row in board.rows}
    assert told["full"] == (0, 8, True) and told["snapkv:budget=0.2"] == (0, 0, False)
    assert board.rows[0]["device_bytes_of_full"] is not None
    assert "Every pair of methods on recall" in reported(store, against="all")[0]
    with pytest.raises(Problem, match="--against tova: expected one of full, "):
        reported(store, against="tova")
