"""Outliers: exact sinks and smoothing in whole models; their definitions are in tests/reference."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import left_padded, prompt, started, tiny

import kvlab
from kvlab.store import Growing, Int, fold_smoothing


@given(data=st.data())
def test_exact_tokens_follow_evictions_and_crops(data):
    x = torch.randn(2, 2, 10, 8, generator=torch.Generator().manual_seed(1))
    store = started(Growing(Int(2), sinks=4))
    store.append(x, x)
    picks = [
        sorted(data.draw(st.lists(st.integers(0, 9), min_size=5, max_size=5, unique=True))) for _ in range(4)
    ]
    slots = torch.tensor(picks).view(2, 2, 5)
    store.keep_slots(slots)
    keys, _ = store.read(x.device)
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for place, token in enumerate(slots[row, head].tolist()):
            assert torch.equal(keys[row, head, place], x[row, head, token]) == (token < 4)
    cropped = started(Growing(Int(2), sinks=4))
    cropped.append(x, x)
    cropped.crop(2)
    cropped.append(x[:, :, 5:9], x[:, :, 5:9])  # two of these are now third and fourth
    keys, _ = cropped.read(x.device)
    assert torch.equal(keys[:, :, :4], x[:, :, [0, 1, 5, 6]])
    assert not torch.equal(keys[:, :, 4:], x[:, :, 7:9])


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_smoothing_in_the_weights_changes_keys_but_no_logit(family):
    model = copy.deepcopy(tiny(family, dtype=torch.float64))
    ids, mask = left_padded([prompt(30), prompt(19, seed=2)])
    before = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    logits = before.feed(ids, mask)
    assert fold_smoothing(model, 1.0, ids[:1]) is model
    after = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    assert torch.allclose(after.feed(ids, mask), logits, atol=1e-5)
    sizes = []
    for stepper in (before, after):
        keys, _ = stepper.cache.layers[1].store.read(ids.device)
        channels = keys[0].abs().amax(1)  # of the row that was the calibration
        sizes.append((channels.amax(-1) / channels.amin(-1)).mean().item())
    assert sizes[1] == pytest.approx(1, abs=1e-4) and sizes[0] > 1.5  # channels of one size
    with pytest.raises(ValueError, match="smoothed already"):
        fold_smoothing(model)
