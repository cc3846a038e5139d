"""AdaKV over every method that scores: the budget is met to the token, and a row is the row alone."""

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep import H2O, AdaKV, KeyDiff, SnapKV
from kvlab.methods import METHODS


def scoring() -> list[str]:
    """Methods that `adakv` takes."""
    found = []
    for name in METHODS:
        try:
            kvlab.make_cache(tiny("llama"), f"adakv:of={name}")
        except ValueError as error:
            assert "\n" not in str(error) and "of=" in str(error)
        else:
            found.append(name)
    return found


def test_what_scores_is_taken_and_what_does_more_is_not():
    found = scoring()
    assert {"sinks", "h2o", "snapkv", "tova", "pyramidkv", "keydiff", "keynorm", "random"} <= set(found)
    assert not {"full", "int4", "paged", "topk", "offload+h2o", "adakv", "kvzip", "d2o"} & set(found)


@pytest.mark.parametrize("kind, given", [
    (H2O, {"every": 5}), (SnapKV, {"chunk_length": 4}), (KeyDiff, {"renumber": True}),
    (KeyDiff, {"every": 5}),
])  # fmt: skip
@torch.no_grad()
def test_what_a_keep_is_told_besides_holds_under_adakv(kind, given):
    """With even shares it is that keep itself; what it is told changes something."""
    found, model = [], tiny("llama", dtype=torch.float64)
    own = {"window": 3} if kind is SnapKV else {}
    for made in (AdaKV(kind(0.4, **own, **given), 1), kind(0.4, **own, **given), kind(0.4, **own)):
        stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=made))
        stepper.feed(prompt(30))
        found.append(torch.cat([stepper.feed(prompt(1, seed=step), last=True) for step in range(12)]))
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[1], found[2], atol=1e-3)
