"""Agreement with the full cache: exact for full itself, near for what stores everything, less for others."""

import math

import pytest
import torch

from eval.accuracy import taskset
from eval.accuracy.agreement import compare, measure, prompts, summary


@pytest.fixture(scope="module")
def ids(loaded):
    return prompts(loaded[1], taskset.stories(), 5, 512)


@pytest.fixture(scope="module")
def found(loaded, ids):
    methods = ("full", "recompute", "static", "int8", "int4", "sinks:budget=0.1")
    return measure(loaded[0], methods, ids, 3)


def values(found, metric):
    names = ("top1", "kl")
    return {method: numbers["metrics"][names.index(metric)]["value"] for method, numbers in found.items()}


def test_full_agrees_with_itself_exactly(found):
    assert found["full"]["values"] == {"top1": [1.0] * 5, "kl": [0.0] * 5}


def test_methods_are_ordered_by_what_they_lose(found):
    top1, kl = values(found, "top1"), values(found, "kl")
    for method in ("recompute", "static"):
        assert top1[method] == 1.0
        assert kl[method] < 1e-8
    assert 0 < kl["int8"] < kl["int4"]
    assert kl["int8"] < kl["sinks:budget=0.1"]
    assert top1["sinks:budget=0.1"] < 1.0


def test_batch_size_changes_nothing(loaded, ids, found):
    one = measure(loaded[0], ("int8",), ids, 1)
    assert one["int8"]["values"]["kl"] == pytest.approx(found["int8"]["values"]["kl"], abs=1e-5)


def test_kl_and_top1_by_hand():
    full = torch.tensor([[[0.0, 0.0], [0.0, 9.0]]])
    other = torch.tensor([[[1.0, 0.0], [9.0, 0.0]]])
    top1, kl = compare(full, other)
    first = 0.5 * (math.log(0.5) - (1 - math.log1p(math.e))) + 0.5 * (math.log(0.5) + math.log1p(math.e))
    p = 1 / (1 + math.exp(-9))
    second = p * 9 - (1 - p) * 9
    assert top1.tolist() == [0.5]
    assert kl.item() == pytest.approx((first + second) / 2, rel=1e-5)
    assert summary("kl", [1.0, 3.0], False)["stderr"] == pytest.approx(1.0)
    assert summary("kl", [1.0], False)["stderr"] is None
