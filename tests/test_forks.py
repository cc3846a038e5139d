"""Forks, beams, crops and copies through transformers; what each comes to is told by tests/fuzz."""

import copy
import io
import pickle
import random

import pytest
import torch
from every import make
from families.models import family
from tiny import NEUTRAL, begun, prompt, rounds, tiny

import kvlab
from kvlab.keep import H2O


@pytest.mark.parametrize("spec", ["full", "static"])
def test_beam_search(spec):
    model, ids = tiny("gpt2"), prompt(18, rows=2)
    how = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    out = model.generate(ids, past_key_values=make(model, spec), **how)
    assert torch.equal(out, tiny("gpt2", "sdpa").generate(ids, **how))


@pytest.mark.parametrize("spec", ["full", "offload:link=1e9", "paged", "recompute"])
def test_pickling_is_refused_in_one_line(spec):
    cache = make(tiny("llama"), spec)
    for copied in (pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"^[^\n]*cannot be pickled: copy.deepcopy\(cache\) copies it$"):
            copied(cache)


def test_a_crop_of_nothing_takes_nothing_from_any_layer():
    model = kvlab.prepare(family("Falcon-H1"))
    stepper = begun(model, "h2o:budget=5", prompt(9))
    cache = stepper.cache
    cache.crop(0)
    assert stepper.feed(prompt(1)).isfinite().all()


def test_crop_with_padding_and_to_nothing():
    model, ids = tiny("llama"), prompt(10, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = begun(model, "full", (ids, mask)).cache
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(-2)
    assert cache.layers[0].positions[:, 0].tolist() == [[*range(8)], [-1] * 4 + [*range(4)]]
    assert cache.layers[0].positions.dtype == torch.long
    assert cache.layers[0].lengths == [8, 4]
    cache.crop(-50)
    assert cache.get_seq_length() == 0


def test_caches_do_not_share_state_with_their_policies_or_each_other():
    model, keep = tiny("llama"), H2O(0.5)
    one, two = kvlab.KVCache(model, keep=keep), kvlab.KVCache(model, keep=keep)
    kvlab.decode(model, prompt(12), one, 4)
    assert one.layers[0].keep.policy is two.layers[0].keep.policy is keep
    assert two.layers[0].keep.limits is None and two.get_seq_length() == 0
    with pytest.raises(ValueError, match="already holds tokens"):
        kvlab.decode(model, prompt(12), one, 4)
    clone = copy.deepcopy(one)
    clone.reset()
    assert one.get_seq_length() == 15


@pytest.mark.parametrize("name", ["Llama", "Jamba", "LFM2", "Qwen3-Next", "Falcon-H1"])
def test_a_cache_that_was_filled_with_gradients_is_copied(name):
    model, ids = copy.deepcopy(family(name)), prompt(9)
    cache = kvlab.make_cache(model, "full")
    model(ids, past_key_values=cache)
    twin = copy.deepcopy(cache)
    after = [model(prompt(1), past_key_values=one).logits for one in (cache, twin)]
    assert torch.equal(*after)


@pytest.mark.parametrize("spec", ["full", "recompute", "h2o:budget=3"])
@pytest.mark.parametrize(
    "rows", [[True, False], [0.0, 1.0], [], [[0]], [0, 5], [-1]], ids=lambda rows: str(rows)
)
def test_rows_that_are_none_are_one_line(spec, rows):
    model = tiny("llama")
    stepper = begun(model, spec, prompt(9, 2))
    with pytest.raises(ValueError, match=r"^rows is torch\.\w+ \([^)]*\): expected one or more rows of 2"):
        stepper.fork(torch.tensor(rows))


@pytest.mark.parametrize("spec", [spec for spec in NEUTRAL if not rounds(spec) and spec != "recompute"])
def test_a_padded_row_of_a_window_alone_is_cropped(spec):
    """The row's padding has left with the window, though none of its tokens has."""
    seed = random.randrange(10**6)
    draw, model = random.Random(seed), family("Gemma 2")
    window = model.config.sliding_window
    none = draw.randint(5, window + 1)
    less = draw.randint(1, window + 3 - none)
    ids, cache = prompt(window + 4, 2), kvlab.make_cache(model, spec)
    mask = torch.ones_like(ids)
    mask[1, :none] = 0
    feed = lambda ids, mask: model(
        ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1)[:, -ids.shape[1] :].clamp(min=0),
        past_key_values=cache,
    ).logits  # fmt: skip
    with torch.no_grad():
        feed(ids, mask)
        cache.reorder_cache(torch.tensor([1]))
        cache.crop(-less)
        cache.stats()
        text, rest = ids[1:, none:-less], prompt(3, 1, 7)
        whole = torch.cat([mask[1:, :-less], torch.ones_like(rest)], 1)
        found = [feed(rest[:, [at]], whole[:, : window + 5 - less + at]) for at in range(3)]
        right = model(torch.cat([text, rest], 1), use_cache=False).logits[:, -3:]
    torch.testing.assert_close(torch.cat(found, 1), right, atol=1e-4, rtol=0, msg=f"seed {seed}")


@pytest.mark.parametrize("spec", ["full", "int8", "paged", "offload"])
def test_a_row_that_is_not_fed_as_a_window_moves_on_is_not_cropped(spec):
    """Its tokens are no longer beside those that other rows were fed with them."""
    model = family("Gemma 2")
    ids = prompt(model.config.sliding_window + 4, 2)
    mask = torch.ones_like(ids)
    mask[1, :-3] = 0
    stepper = begun(model, spec, (ids, mask), (prompt(3, 2), torch.tensor([[1, 1, 1], [1, 0, 0]])))
    stepper.fork(torch.tensor([1]))
    with pytest.raises(ValueError, match="crop: the window has left tokens behind"):
        stepper.cache.crop(-2)
