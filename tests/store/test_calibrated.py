"""Scales that are given: what is written by them, and files that do not fit."""

import numpy as np
import pytest
import torch
from families.models import family
from safetensors.torch import save_file
from tiny import begun, left_padded, prompt, tiny

import kvlab
from kvlab.attention import recorded
from kvlab.calibrate.scales import write_scales
from kvlab.saved import inside
from kvlab.store import Calibrated


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


def test_a_padded_batch_forks_and_true_bits(file):
    model = tiny("llama")
    write_scales(file, model, channels=True)
    ids, mask = left_padded([prompt(12), prompt(5, seed=4)])
    token, logits = prompt(1, seed=3), {}
    for name, (given, real) in {"both": (ids, mask), "alone": (prompt(5, seed=4), None)}.items():
        stepper = begun(model, {"store": Calibrated(file)}, (given, real))
        if name == "both":
            stepper.fork(torch.tensor([1, 1, 0]))
        logits[name] = stepper.feed(token.repeat(3 if name == "both" else 1, 1), last=True)
    assert torch.allclose(logits["both"][:2], logits["alone"].expand(2, -1), atol=1e-4)
    store = kvlab.KVCache(model, store=Calibrated(file)).layers[0].store
    assert store.format.bits_per_value((2, 16, 8)) == 8 + 1


@pytest.mark.parametrize("times", [-1, 1e8])
def test_magnitudes_are_above_0_and_within_the_scales(file, times):
    write_scales(file, tiny("llama"))
    told, held = inside(file, "")
    save_file(held | {"keys": times * held["keys"]}, file, told)
    with pytest.raises(ValueError, match="keys: expected largest magnitudes, all above 0"):
        Calibrated(file)


def test_a_model_with_latents_has_no_scales(tmp_path):
    with pytest.raises(ValueError, match="caches latents, which have no scales of K and V"):
        write_scales(tmp_path / "x", family("DeepSeek-V3"))
    assert not (tmp_path / "x").exists()
