"""R-KV in whole models: when it compresses, what it remembers, windows, bytes, refusals."""

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep.rkv import redundancy


def test_it_compresses_every_so_many_tokens():
    model = tiny("llama")
    cache = kvlab.make_cache(model, "rkv:budget=10,every=4,window=3")
    trace = kvlab.decode(model, prompt(30, rows=2), cache, 13)
    assert trace.tokens_held == [10, 11, 12, 13] * 3 + [10]
    assert kvlab.make_cache(model, "rkv").layers[0].keep.policy.every == 128


def test_what_is_said_again_goes_first():
    """Four keys point one way, and one another: of the four the latest is spared."""
    keys = torch.tensor([[1.0, 0, 0], [1, 0.01, 0], [0, 1, 0], [1, 0, 0.01], [1, 0.01, 0.01]])[None, None]
    found = redundancy(keys, torch.arange(5)[None, None])[0, 0]
    assert float(found.sum()) == pytest.approx(1)
    assert found[[2, 4]].max() < found[[0, 1, 3]].min()
    empty = torch.tensor([[[0, 1, -1, 2, 3]]])
    left = redundancy(keys[:, :, [0, 1, 3, 4]], torch.arange(4)[None, None])
    assert torch.allclose(redundancy(keys, empty)[..., [0, 1, 3, 4]], left)
    assert redundancy(keys, empty)[0, 0, 2] == 0


@pytest.mark.parametrize("budget", [9, 4])
def test_a_window_of_the_model(budget):
    """Under a sliding window of 9 a budget of 9 gives nothing up, one of 4 does."""
    model = tiny("mistral", sliding_window=9)
    full, found = (
        kvlab.decode(model, prompt(40), kvlab.make_cache(model, spec), 12).logprobs
        for spec in ("full", f"rkv:budget={budget},every=2,window=2")
    )
    assert torch.allclose(full, found, atol=1e-5) == (budget == 9)
