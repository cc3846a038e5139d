"""Scales that are given: what is written by them, and files that do not fit."""

import numpy as np
import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.attention import recorded
from kvlab.calibrate.scales import write_scales


@pytest.fixture
def file(tmp_path):
    return tmp_path / "scales.safetensors"


def upwards(x):
    """The smallest number of fp16 that is not below x."""
    half = x.numpy().astype(np.float16)
    return torch.from_numpy(np.where(half < x.numpy(), np.nextafter(half, np.float16(1)), half)).float()


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_token_is_rounded_by_the_given_scales(file, bits, channels):
    """Those of another text: the prompt's own have no say, and what lies beyond is clipped and counted."""
    model, other, ids = tiny("llama"), prompt(9, seed=7), prompt(30)
    write_scales(file, model, other, channels)
    cache = kvlab.make_cache(model, f"kvlab.store.Calibrated:profile={file},bits={bits}")
    stepper = kvlab.Stepper(model, cache)
    for piece in (ids[:, :20], ids[:, 20:21]):
        stepper.feed(piece)
    top, beyond = 2 ** (bits - 1) - 1, 0
    calibrated, true = (recorded(model, x) for x in (other, ids[:, :20]))
    for index, layer in enumerate(cache.layers):
        assert layer.store.length == 21
        pairs = zip(layer.store.read(ids.device), ("keys", "values"), strict=True)
        for held, name in pairs:
            size = getattr(calibrated[index], name)[0].abs()
            step = upwards(size.amax(1 if channels else (1, 2), keepdim=True) / top)
            codes = getattr(true[index], name)[0] / step
            expected = codes.round().clamp(-top, top) * step
            apart = (held[0, :, :20] - expected).abs()
            assert (apart > 1e-5).sum() <= 2 and (apart <= step * 1.01).all()  # between two codes
            beyond += int((codes.abs() > top + 0.6).sum())
    assert beyond > 0 and sum(layer.store.clipped for layer in cache.layers) >= beyond
