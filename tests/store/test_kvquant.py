"""PreRope and NonUniform: keys as the projection gave them, and rows that begin later."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import left_padded, prompt, started, tiny

import kvlab
from kvlab.keep import H2O
from kvlab.store import Growing, NonUniform, PreRope


def logits(model, prompts, later=9, **policies):
    stepper = kvlab.Stepper(model, kvlab.KVCache(model, **policies))
    found = [stepper.feed(*left_padded(prompts))]
    found += [stepper.feed(prompt(1, len(prompts), seed=at)) for at in range(later)]
    return torch.cat(found, 1), stepper


def test_the_first_token_of_every_row_is_exact():
    """It is the one that attention rests on, and its key has outliers in every channel."""
    model, prompts = tiny("llama"), [prompt(19, seed=1), prompt(8, seed=2)]
    ids, mask = left_padded(prompts)
    read = []
    for spec in ("full", "kvquant:bits=2"):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        stepper.feed(ids, mask)
        read.append(stepper.cache.layers[2].store.read(ids.device))
    for true, ours in zip(*read, strict=True):
        for row, first in enumerate((0, 11)):
            assert torch.allclose(true[row, :, first], ours[row, :, first], atol=1e-5)
            assert not torch.allclose(true[row, :, first + 1], ours[row, :, first + 1], atol=1e-2)


@given(seed=st.integers(0, 99), axis=st.sampled_from(["channel", "token"]), late=st.booleans())
def test_padding_has_no_say_in_levels_even_of_a_row_that_begins_later(seed, axis, late):
    x = torch.randn(2, 2, 14, 8, generator=torch.Generator().manual_seed(seed))
    first = 0 if late else 4  # tokens of row 0 among the first 8
    x[0, :, : 8 - first] *= 100
    real = torch.arange(8)[None] >= torch.tensor([[8 - first], [0]])
    form = NonUniform(3, axis)
    together, alone = started(Growing(form)), started(Growing(form))
    together.append(x[:, :, :8], x[:, :, :8], real)
    together.append(x[:, :, 8:], x[:, :, 8:])
    if first:
        alone.append(x[:1, :, 4:8], x[:1, :, 4:8])
    alone.append(x[:1, :, 8:], x[:1, :, 8:])
    for one, other in zip(together.read(x.device), alone.read(x.device), strict=True):
        assert torch.isfinite(one).all() and torch.equal(one[:1, :, 8 - first :], other)


def test_exact_keys_before_rope_in_a_window_and_among_survivors():
    window = tiny("mistral", sliding_window=7)
    prompts = [prompt(19, seed=1), prompt(8, seed=2)]
    assert torch.allclose(logits(window, prompts)[0], logits(window, prompts, store=PreRope())[0], atol=1e-5)
    model, keep = tiny("llama"), H2O(0.4)
    full, stepper = logits(model, prompts, keep=keep)
    ours, mine = logits(model, prompts, keep=keep, store=PreRope())
    assert torch.allclose(full, ours, atol=1e-5)
    for one, other in zip(stepper.cache.layers, mine.cache.layers, strict=True):
        assert torch.equal(one.slot_positions, other.slot_positions)
