"""Sinks: the kept set is known in advance; and what every keep has in common."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab


def test_a_method_of_ones_own_in_a_few_lines():
    class SmallestKeys(kvlab.keep.Keep):
        """Keep the keys with the smallest norm."""

        def score(self, layer):
            keys, _ = layer.store.read(layer.slot_positions.device)
            return -keys.norm(dim=-1)

    model, ids = tiny("llama"), prompt(30)
    cache = kvlab.KVCache(model, keep=SmallestKeys(5))
    stepper = kvlab.Stepper(model, cache)
    everything = kvlab.KVCache(model)
    kvlab.Stepper(model, everything).feed(ids)
    stepper.feed(ids)
    norms = everything.layers[0].store.keys[0][0].norm(dim=-1)  # layer 0 sees the same keys in both
    smallest = norms[:, :-1].topk(4, largest=False).indices
    newest = torch.full((2, 1), 29)  # has no say: it is always held
    assert torch.equal(cache.layers[0].positions[0], torch.cat([smallest, newest], 1).sort().values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_newest_token_is_held_whatever_it_scores(sign):
    class Infinite(kvlab.keep.Keep):
        """Every token scores the same infinity: the oldest stay, and the newest."""

        def score(self, layer):
            return torch.full(layer.slot_positions.shape, sign * torch.inf)

    model = tiny("llama")
    ids, mask = left_padded([prompt(12), prompt(4, seed=1)])
    cache = kvlab.KVCache(model, keep=Infinite(5))
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    assert cache.layers[3].positions[:, 1].tolist() == [[0, 1, 2, 3, 11], [0, 1, 2, 3, -1]]
    stepper.feed(prompt(1, rows=2))
    stepper.feed(prompt(3, rows=2))
    assert cache.layers[3].positions[:, 1].tolist() == [[0, 1, 2, 3, 15], [0, 1, 2, 3, 7]]


def test_a_keep_that_does_not_score_says_so():
    model = tiny("llama")
    with pytest.raises(TypeError, match="define score"):
        kvlab.decode(model, prompt(10), kvlab.KVCache(model, keep=kvlab.keep.Keep(3)), 2)
