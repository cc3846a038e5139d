"""What every keep has in common: the newest token, and a score."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab


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
