"""KIVI: bits, the room of its window, crops, and what is refused; its definition is in tests/reference."""

import pytest
import torch
from tiny import begun, prompt, started, tiny

from kvlab.store import Kivi


def fresh(bits, group, recent, width):
    return started(Kivi(bits, group, recent), width)


@pytest.mark.parametrize("bits, tokens", [(2, 200), (4, 97), (2, 20), (4, 33), (2, 32)])
def test_stated_bits_are_those_of_the_storages(bits, tokens):
    store = fresh(bits, 32, 32, 64)
    x = torch.randn(3, 2, tokens, 64)
    store.append(x, x)
    held = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors())
    assert held * 8 == pytest.approx(2 * x.numel() * store.policy.bits_per_value((2, tokens, 64), x.dtype))


def test_what_follows_a_cropped_padding_is_none():
    store = fresh(2, 4, 20, 8)
    x, real = torch.randn(2, 2, 2, 12, 8), torch.arange(12)[None] >= torch.tensor([[9], [0]])
    store.append(*x, real)
    store.crop(5)
    store.append(*x[:, :, :, :2])
    assert store.recents_real[:, 0, :7].tolist() == [[False] * 5 + [True] * 2, [True] * 7]


def test_crop_inside_the_window_or_not_at_all():
    model = tiny("llama")
    stepper = begun(model, "kivi2:group=4,recent=6", prompt(20, rows=2))
    cache = stepper.cache
    with pytest.raises(ValueError, match="14 tokens are written in blocks and cannot be taken back to 12"):
        cache.crop(-8)
    assert cache.get_seq_length() == 20
    cache.crop(-6)
    assert cache.get_seq_length() == 14
