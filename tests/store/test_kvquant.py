"""PreRope and NonUniform: keys as the projection gave them, and rows that begin later."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import fed, left_padded, prompt, started, tiny

from kvlab.keep import H2O
from kvlab.store import Float8, Growing, Int, NonUniform, PreRope


def test_the_first_token_of_every_row_is_exact():
    """It is the one that attention rests on, and its key has outliers in every channel."""
    model, prompts = tiny("llama"), [prompt(19, seed=1), prompt(8, seed=2)]
    ids, mask = left_padded(prompts)
    caches = [fed(model, spec, ids, mask, steps=0)[0] for spec in ("full", "kvquant:bits=2")]
    read = [cache.layers[2].store.read(ids.device) for cache in caches]
    for true, ours in zip(*read, strict=True):
        for row, first in enumerate((0, 11)):
            assert torch.allclose(true[row, :, first], ours[row, :, first], atol=1e-5)
            assert not torch.allclose(true[row, :, first + 1], ours[row, :, first + 1], atol=1e-2)


SHARED = [
    NonUniform(3, "channel"), NonUniform(3, "token"), Int(8, axis="channel"), Int(8, axis="tensor"),
    Float8(axis="channel"),
]  # fmt: skip


@given(seed=st.integers(0, 99), form=st.sampled_from(SHARED), late=st.booleans())
def test_padding_has_no_say_in_levels_and_scales_even_of_a_row_that_begins_later(seed, form, late):
    x = torch.randn(2, 2, 14, 8, generator=torch.Generator().manual_seed(seed))
    first = 0 if late else 4  # tokens of row 0 among the first 8
    x[0, :, : 8 - first] *= 100
    real = torch.arange(8)[None] >= torch.tensor([[8 - first], [0]])
    together, alone = started(Growing(form)), started(Growing(form))
    together.append(x[:, :, :8], x[:, :, :8], real)
    together.append(x[:, :, 8:], x[:, :, 8:])
    if first:
        alone.append(x[:1, :, 4:8], x[:1, :, 4:8])
    alone.append(x[:1, :, 8:], x[:1, :, 8:])
    for one, other in zip(together.read(x.device), alone.read(x.device), strict=True):
        assert torch.isfinite(one).all() and torch.equal(one[:1, :, 8 - first :], other)


def test_exact_keys_before_rope_in_a_window_and_among_survivors():
    for model, keep in ((tiny("mistral", sliding_window=7), None), (tiny("llama"), H2O(0.4))):
        given = left_padded([prompt(19, seed=1), prompt(8, seed=2)])
        plain, expected = fed(model, {"keep": keep}, *given, steps=9)
        cache, found = fed(model, {"keep": keep, "store": PreRope()}, *given, steps=9)
        assert torch.allclose(expected, found, atol=1e-5)
        for one, other in zip(plain.layers, cache.layers, strict=True):
            assert torch.equal(one.slot_positions, other.slot_positions)
