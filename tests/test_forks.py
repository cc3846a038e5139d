"""Forks, beams, crops, resets and copies of a cache: each goes on as if it were alone."""

import copy
import io
import pickle

import pytest
import torch
from every import COMPOSED, EVERY, make
from tiny import prompt, refused, tiny

import kvlab
from kvlab.keep import H2O

pytestmark = pytest.mark.uncounted


@pytest.mark.parametrize("spec", EVERY)
def test_fork_equals_separate_prompts(spec):
    model, ids = tiny("llama"), prompt(18, rows=2)
    later = prompt(3, rows=4, seed=5)
    rows = torch.tensor([0, 1, 0, 1])
    forked = kvlab.Stepper(model, make(model, spec))
    forked.feed(ids)
    forked.fork(rows)
    apart = kvlab.Stepper(model, make(model, spec))
    apart.feed(ids[rows])
    for step in range(3):
        token = later[:, step : step + 1]
        assert torch.allclose(forked.feed(token), apart.feed(token), atol=1e-4)
    assert torch.equal(forked.cache.layers[1].positions, apart.cache.layers[1].positions)


def test_fork_of_recompute():
    model, ids = tiny("llama"), prompt(9)
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "recompute"))
    stepper.feed(ids)
    stepper.fork(torch.zeros(2, dtype=torch.long))
    both = stepper.feed(prompt(1, rows=2, seed=3))
    full = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    full.feed(ids.expand(2, -1))
    assert torch.allclose(both, full.feed(prompt(1, rows=2, seed=3)), atol=1e-5)


@pytest.mark.parametrize("spec", EVERY)
def test_beam_search(spec):
    family = "llama" if spec not in COMPOSED and refused(tiny("gpt2"), spec) else "gpt2"
    model, ids = tiny(family), prompt(18, rows=2)
    settings = {
        "max_new_tokens": 6,
        "num_beams": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    out = model.generate(ids, past_key_values=make(model, spec), **settings)
    assert out.shape == (2, 24)
    if spec in ("full", "static"):
        assert torch.equal(out, tiny("gpt2", "sdpa").generate(ids, **settings))


def test_batch_helpers_of_transformers():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "h2o")
    kvlab.Stepper(model, cache).feed(prompt(12, rows=2))
    kept = cache.layers[0].positions
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].positions, kept.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(cache.layers[0].positions, kept[1:])


@pytest.mark.parametrize("spec", EVERY)
def test_crop_forgets_or_refuses(spec):
    model, ids = tiny("llama"), prompt(20, rows=2)
    cache = make(model, spec)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids)
    before = stepper.feed(prompt(1, rows=2, seed=8))
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.crop(0)
    if cache.layers[0].keep.policy.evicts:
        with pytest.raises(ValueError, match="evicted"):
            cache.crop(-1)
        return
    cache.crop(-1)
    assert cache.get_seq_length() == 20
    stepper.ids, stepper.mask = stepper.ids[:, :-1], stepper.mask[:, :-1]
    again = stepper.feed(prompt(1, rows=2, seed=8))
    assert torch.allclose(again, before, atol=1e-5)


def test_crop_with_padding_and_to_nothing():
    model, ids = tiny("llama"), prompt(10, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = kvlab.make_cache(model, "full")
    kvlab.Stepper(model, cache).feed(ids, mask)
    cache.crop(-2)
    assert cache.layers[0].positions[:, 0].tolist() == [[*range(8)], [-1] * 4 + [*range(4)]]
    assert cache.layers[0].lengths == [8, 4]
    cache.crop(-50)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("spec", EVERY)
def test_reset_starts_over(spec):
    model, ids = tiny("llama"), prompt(16, rows=2)
    cache = make(model, spec)
    first = kvlab.decode(model, ids, cache, 5)
    with pytest.raises(ValueError, match="already holds tokens"):
        kvlab.decode(model, ids, cache, 5)
    cache.reset()
    assert cache.stats().device_bytes == cache.stats().host_bytes == cache.get_seq_length() == 0
    second = kvlab.decode(model, ids[:1], cache, 5)
    assert torch.equal(first.tokens[:1], second.tokens)


def test_caches_do_not_share_state_with_their_policies_or_each_other():
    model, keep = tiny("llama"), H2O(0.5)
    one, two = kvlab.KVCache(model, keep=keep), kvlab.KVCache(model, keep=keep)
    kvlab.decode(model, prompt(12), one, 4)
    assert one.layers[0].keep.policy is two.layers[0].keep.policy is keep
    assert two.layers[0].keep.limits is None and two.get_seq_length() == 0
    clone = copy.deepcopy(one)
    clone.reset()
    assert one.get_seq_length() == 15


MOMENTS = "empty", "prompt", "two steps", "half a prompt"


@pytest.mark.parametrize(
    "spec, moment",  # half of the moments each, in turn, and amid a prompt each
    [(spec, MOMENTS[at]) for i, spec in enumerate([*EVERY, "recompute"]) for at in sorted({i % 4, 3})],
)
def test_a_deep_copy_and_its_original_go_on_independently(spec, moment):
    """Both as if alone: the copy with other tokens, while the original waits, and the other way round."""
    model, ids = tiny("llama"), prompt(17, rows=2)

    def until(cache):
        stepper = kvlab.Stepper(model, cache)
        if moment == "half a prompt":
            with cache.prefill():
                stepper.feed(ids[:, :11])
                return stepper, copy.deepcopy(cache)
        if moment != "empty":
            stepper.feed(ids)
        if moment == "two steps":
            for seed in range(2):
                stepper.feed(prompt(1, rows=2, seed=seed))
        return stepper, copy.deepcopy(cache)

    def go_on(stepper, seed):
        first = {"empty": ids, "half a prompt": ids[:, 11:]}.get(moment, ids[:, :1])
        return [stepper.feed(x) for x in (first, *prompt(3, rows=2, seed=seed).split(1, 1))]

    stepper, twin = until(make(model, spec))
    other = kvlab.Stepper(model, twin)
    other.ids, other.mask = stepper.ids, stepper.mask
    if moment == "half a prompt":
        stepper.cache.reset()  # the block has ended with the half: only the copy may go on as one prompt
        alone = kvlab.Stepper(model, make(model, spec))
        with alone.cache.prefill():
            alone.feed(ids[:, :11])
            alone.feed(ids[:, 11:])
        found = [go_on(other, 3)[1:]]
        expected = [[alone.feed(x) for x in prompt(3, rows=2, seed=3).split(1, 1)]]
    else:
        mine = [stepper.feed(x) for x in ([ids] if moment == "empty" else [ids[:, :1]])]
        theirs = go_on(other, 3)
        mine += [stepper.feed(x) for x in prompt(3, rows=2, seed=4).split(1, 1)]
        found, expected = [theirs, mine], []
        for seed in (3, 4):
            expected.append(go_on(until(make(model, spec))[0], seed))
    for ours, right in zip(found, expected, strict=True):
        for one, two in zip(ours, right, strict=True):
            assert torch.allclose(one, two, atol=1e-5)


def test_a_prefix_is_read_once_and_continued_twice():
    """The recipe of transformers: fill a cache with the prefix, and hand `generate` a deep copy."""
    model, prefix = tiny("llama"), prompt(20)
    for spec in ("full", "static", "offload:link=1e9", "h2o:budget=9", "infinigen:link=1e9", "paged"):
        cache = make(model, spec)
        with torch.no_grad():
            model(prefix, past_key_values=cache)
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(5, seed=seed)], 1)
            settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            found = model.generate(ids, past_key_values=copy.deepcopy(cache), **settings)
            if spec in ("full", "static", "offload:link=1e9", "paged"):
                assert torch.equal(found, tiny("llama", "sdpa").generate(ids, **settings)), spec
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("spec", ["full", "offload:link=1e9", "paged", "recompute"])
def test_pickling_is_refused_in_one_line(spec):
    cache = make(tiny("llama"), spec)
    for copied in (pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled: copy.deepcopy\(cache\) copies it") as error:
            copied(cache)
        assert "\n" not in str(error.value)
