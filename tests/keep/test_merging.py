"""Merging in whole models: windows and buffers; its definition is in tests/reference."""

import torch
from tiny import prompt, tiny

import kvlab


def test_what_leaves_a_window_is_lost():
    model = tiny("mistral", sliding_window=9)
    found = [
        kvlab.decode(model, prompt(40), kvlab.make_cache(model, spec), 12).logprobs
        for spec in ("full", "d2o:budget=9", "d2o:budget=4")
    ]
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[0], found[2], atol=1e-3)
