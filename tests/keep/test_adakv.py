"""AdaKV over every method that scores: the budget is met to the token."""

import pytest
import torch
from tiny import begun, left_padded, prompt, tiny

import kvlab
from kvlab.keep import H2O, AdaKV, KeyDiff, SnapKV
from kvlab.methods import METHODS

SIZES = (50, 21, 34)


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
        stepper = begun(model, {"keep": made}, prompt(30))
        found.append(torch.cat([stepper.feed(prompt(1, seed=step), last=True) for step in range(12)]))
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[1], found[2], atol=1e-3)


@pytest.mark.parametrize("name", scoring())
@torch.no_grad()
def test_any_score_can_share_a_budget(name):
    model, spec = tiny("llama", dtype=torch.float64), f"adakv:of={name},budget=0.4"
    ids, mask = left_padded([prompt(size, seed=size) for size in SIZES])
    cache, even = kvlab.make_cache(model, spec), kvlab.make_cache(model, f"{name}:budget=0.4")
    for one in (cache, even):
        kvlab.Stepper(model, one).feed(ids, mask)
    for layer, other in zip(cache.layers, even.layers, strict=True):
        held, evenly = ((one.positions >= 0).sum((1, 2)).tolist() for one in (layer, other))
        assert held == evenly  # of a layer and a row, over its heads
        least = [max(1, int(0.2 * (count // 2))) for count in evenly]
        assert all((layer.positions >= 0).sum(-1).amin(-1) >= torch.tensor(least))
