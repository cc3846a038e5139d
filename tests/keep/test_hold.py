"""After `cache.hold()` what is written is held on top of the budget, and nothing of the context goes."""

import pytest
import torch
from tiny import tiny

import kvlab
from kvlab.decode import Stepper


@pytest.mark.parametrize("method", ["sinks", "h2o", "tova", "snapkv", "pyramidkv", "offload+h2o"])
def test_nothing_of_the_context_goes(method):
    model = tiny("llama")
    ids = torch.arange(40).view(1, -1) % 96
    cache = kvlab.make_cache(model, f"{method}:budget=0.4")
    stepper = Stepper(model, cache)
    stepper.feed(ids[:, :30])
    kept = [layer.positions.clone() for layer in cache.attending]
    cache.hold()
    stepper.feed(ids[:, 30:36])
    stepper.fork(torch.tensor([0, 0]))
    for column in range(36, 40):
        stepper.feed(ids[:, column : column + 1].repeat(2, 1))
    for layer, before in zip(cache.attending, kept, strict=True):
        later = torch.arange(30, 40).expand(*before.shape[:2], -1)
        expected = torch.cat([before, later], -1).repeat(2, 1, 1)
        assert torch.equal(layer.positions, expected)
    cache.reset()
    again = Stepper(model, cache)
    again.feed(ids[:, :30])
    again.feed(ids[:, 30:31])
    evicting = method not in ("snapkv", "pyramidkv")
    assert (cache.attending[0].slots == kept[0].shape[-1]) is evicting  # the flag went with the reset
