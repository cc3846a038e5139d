"""Weights in large pages are the same weights, held once, in the order in which they are read."""

import copy
import mmap

import pytest
import torch
from tiny import prompt, tiny
from torch import nn

import kvlab
from kvlab.fast import pages
from kvlab.fast.compiled import compiled

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such pages")
WIDE = {"hidden_size": 96, "intermediate_size": 5001, "vocab_size": 701}


def odd() -> nn.Sequential:
    """Layers of odd sizes, of more than one page, two of which share their weights."""
    model = nn.Sequential(nn.Linear(701, 333), nn.Linear(333, 701), nn.Linear(701, 333), nn.Linear(333, 701))
    model[2].weight = model[0].weight
    return model


@linux
def test_weights_are_the_same_and_lie_in_their_order():
    model = odd()
    before = copy.deepcopy(model)
    assert pages.gather(model.parameters())
    found = list(model.parameters())
    assert len(found) == 7 and model[2].weight is model[0].weight
    assert all(map(torch.equal, found, before.parameters()))
    starts = [one.data_ptr() for one in found]
    assert starts == sorted(starts) and all(start % pages.LINE == 0 for start in starts)
    ends = [one.data_ptr() + one.nbytes for one in found]
    assert all(end <= start < end + pages.LINE for end, start in zip(ends, starts[1:], strict=False))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[1].weight.mul_(2)
    assert torch.equal(twin[1].weight, before[1].weight) and torch.equal(model[1].bias, before[1].bias)
    del model, found
    assert torch.equal(twin[3].weight, before[3].weight), "the block is given back, a copy is its own"


@linux
def test_a_compiled_model_computes_and_is_written_as_before(tmp_path):
    eager = tiny("llama", **WIDE)
    fast = compiled(copy.deepcopy(eager))
    starts = [one.data_ptr() for one in fast.parameters()]
    assert starts == sorted(starts), "one block"
    logits = []
    for model in (eager, fast):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, "int8"))
        stepper.feed(prompt(9))
        logits.append(stepper.feed(prompt(1), last=True))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()
    fast.save_pretrained(tmp_path)
    again = type(fast).from_pretrained(tmp_path)
    assert all(map(torch.equal, again.parameters(), eager.parameters()))
