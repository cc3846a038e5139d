"""Weights in large pages are the same weights, held once, in the order in which they are read."""

import copy
import mmap

import pytest
import torch
from torch import nn

from kvlab.fast import pages

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such pages")


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
