"""A pass that is refused, or comes from another model: noticed before a token is wrong."""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch
from families.models import FAMILIES, LATENT, build, family
from tiny import begun, interrupt, left_padded, prompt, tiny

import kvlab
from kvlab.store import BlockPool, Paged

IDS = torch.randint(2, 96, (1, 14), generator=torch.Generator().manual_seed(3))
HELD = 8
# attention alone, states in layers of their own, states beside attention, other states, a latent
PATHS = ["Llama", "LFM2", "Falcon-H1", "Qwen3-Next", "DeepSeek-V3"]


def test_a_hook_may_look_at_the_cache_and_not_copy_it():
    model = tiny("llama")
    cache, said = kvlab.make_cache(model, "h2o:budget=4"), []

    def look(*_):
        said.append(cache.stats().tokens_seen)
        assert all(cache.layers)
        with pytest.raises(RuntimeError, match="change or copy it when it has ended"):
            copy.deepcopy(cache)

    with model.model.embed_tokens.register_forward_hook(look):
        kvlab.decode(model, prompt(20), cache, 3)
    assert said[0] == 0 and said[-1] > 20


@pytest.mark.parametrize(
    "name, spec", [("LFM2", "full"), ("Falcon-H1", "full"), ("Llama", "kivi2:group=4,recent=4")]
)
def test_padding_that_would_change_a_row_is_refused(name, spec):
    """A row of a batch would answer otherwise than alone."""
    model = kvlab.prepare(family(name))
    stepper = begun(model, spec, left_padded([prompt(12), prompt(7, seed=1)]))
    stepper.copied().feed(prompt(2, 2))
    with pytest.raises(
        ValueError, match=r"padding between a row's tokens (moves the state of a|takes places in)"
    ):
        stepper.feed(prompt(3, 2), torch.tensor([[1, 1, 1], [0, 1, 1]]))


@pytest.mark.parametrize("name", ["LFM2", "Falcon-H1", "Qwen3-Next"])
def test_states_do_not_take_padding_for_a_token(name):
    """transformers drops the mask of a pass of one column."""
    model = kvlab.prepare(family(name))
    ids, mask = left_padded([prompt(12), prompt(7, seed=1)])
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    with stepper.cache.prefill():
        stepper.feed(ids[:, :2], mask[:, :2])
        with pytest.raises(ValueError, match="before a row's first token, in a pass of one column"):
            stepper.feed(ids[:, 2:3], mask[:, 2:3])
        found = stepper.feed(ids[:, 2:], mask[:, 2:])
    alone = kvlab.Stepper(model, kvlab.make_cache(model, "full")).feed(ids[1:, 5:])
    torch.testing.assert_close(found[1:, -7:], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["LFM2", "Falcon-H1", "Qwen3-Next", "Llama"])
def test_a_pass_of_other_rows_loses_nothing(name):
    model = kvlab.prepare(family(name))
    stepper = begun(model, "full", prompt(9, 2))
    expected = stepper.copied().feed(prompt(1, 2))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"batch of {rows} rows, but the cache holds 2"), torch.no_grad():
            model(prompt(1, rows), past_key_values=stepper.cache)
    assert torch.equal(stepper.feed(prompt(1, 2)), expected)


@pytest.mark.parametrize("spec", ["full", "h2o:budget=4", "kvzip:budget=0.5", "topk:budget=4"])
@pytest.mark.parametrize("name", ["reset", "crop", "hold", "reorder_cache"])
def test_a_cache_is_not_changed_inside_its_own_pass(spec, name):
    """A hook of the user's, or a signal handler, would mix rows without a word."""
    model, calls = tiny("llama"), []
    arguments = {"crop": (-1,), "reorder_cache": (torch.tensor([0]),)}.get(name, ())
    cache, other = (kvlab.make_cache(model, spec) for _ in range(2))

    def change(*_):
        with suppress(ValueError):  # what is evicted cannot be cropped
            getattr(other, name)(*arguments)  # another cache may
        with pytest.raises(RuntimeError, match="a pass through this cache is running"):
            getattr(cache, name)(*arguments)
        calls.append(name)

    kvlab.Stepper(model, other).feed(prompt(9))
    right = kvlab.decode(model, prompt(20), kvlab.make_cache(model, spec), 3).tokens
    with model.model.layers[1].register_forward_hook(change):
        found = kvlab.decode(model, prompt(20), cache, 1)
    assert calls and found.tokens.tolist() == right[:, :1].tolist()
    with suppress(ValueError):
        getattr(cache, name)(*arguments)


@pytest.mark.parametrize("seen", [0, HELD])
@pytest.mark.parametrize("attends", ["kvlab", "eager", "sdpa"])
@pytest.mark.parametrize("name", PATHS)
def test_a_cache_of_another_model_is_refused_before_anything_is_written(name, attends, seen):
    kind, odd = FAMILIES[name]
    one, other = family(name), build(kind, odd or LATENT, seed=8)
    cache = kvlab.make_cache(one, "full")
    kvlab.prepare(other) if attends == "kvlab" else other.set_attn_implementation(attends)
    with torch.no_grad():
        expected = one(IDS, use_cache=False).logits[:, seen:]
        if seen:
            one(IDS[:, :seen], past_key_values=cache)
        for ask in (other, partial(other.generate, max_new_tokens=2)):
            with pytest.raises(ValueError, match="this cache was made for another model, a"):
                ask(IDS[:, seen:], past_key_values=cache)
        with pytest.raises(ValueError, match="this cache was made for another model, a"):
            kvlab.Stepper(other, cache)
        assert cache.get_seq_length() == seen
        found = one(IDS[:, seen:], past_key_values=cache).logits
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("how", ["refused", "interrupted"])
@pytest.mark.parametrize("then", ["Llama", "DeepSeek-V3", "a part of Llama"])
def test_a_latent_pass_that_breaks_off_leaves_the_next_attention_alone(how, then):
    """Numbers that a latent layer handed out wait for nobody but its own model, in its own pass."""
    latent, llama = kvlab.prepare(family("DeepSeek-V3")), kvlab.prepare(family("Llama"))
    after = latent if then == "DeepSeek-V3" else llama
    attention, hidden = llama.model.layers[0].self_attn, torch.ones(1, 4, 63)
    rotary = llama.model.rotary_emb(hidden, torch.arange(4)[None])

    def run():
        if then == "a part of Llama":
            return attention(hidden, position_embeddings=rotary, attention_mask=None)[0]
        return after(IDS[:, :6], use_cache=False).logits

    with torch.no_grad():
        expected = run()
        stepper = begun(latent, "full", IDS[:, :5])
        if how == "refused":
            with pytest.raises(ValueError, match="batch of 2 rows"):
                latent(IDS[:, 5:6].repeat(2, 1), past_key_values=stepper.cache)
        else:
            part = latent.model.layers[0].self_attn.kv_b_proj
            with part.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
                stepper.feed(IDS[:, 5:6])
        assert torch.equal(run(), expected)


@pytest.mark.parametrize(
    "spec",
    ["static:length=18", "fp8", "kivi4:group=8,recent=6", "kvquant", "int8:axis=channel", "int4:sinks=2"],
)
@torch.no_grad()
def test_a_refused_token_changes_nothing(spec, tmp_path):
    """A full buffer, or a number that a format cannot hold: the text can be cropped, be saved, and go on."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(16)
    cache, alone = (kvlab.make_cache(model, spec) for _ in range(2))
    steppers = [kvlab.Stepper(model, one) for one in (cache, alone)]
    for stepper in steppers:
        stepper.feed(ids)
    tokens = 3 if spec.startswith("static") else 1
    loud = model.model.layers[0].self_attn.v_proj.register_forward_hook(
        lambda module, args, out: out.clone().fill_(float("inf"))
    )
    if spec.startswith("static"):
        loud.remove()
    for _ in range(2):
        with pytest.raises(ValueError, match="layer 0: "):
            steppers[0].feed(prompt(tokens))
    loud.remove()
    assert not cache.broken and cache.stats() == alone.stats()
    cache.save(tmp_path / "cache")
    for one in (cache, alone):
        one.crop(-1)
    for step in range(3):
        found, wanted = (model(prompt(1, seed=step), past_key_values=one).logits for one in (cache, alone))
        assert torch.equal(found, wanted)


def test_a_step_waits_for_the_blocks_of_another_request():
    model, pool, ids = tiny("llama"), BlockPool(11, 4), prompt(12)
    first, other = (kvlab.Stepper(model, kvlab.KVCache(model, store=Paged(pool=pool))) for _ in range(2))
    layers = len(first.cache.layers)
    pool.limit = 3 * layers + 2 * layers + layers - 1  # no block for the last layer of a step
    first.feed(ids)
    other.feed(ids[:, :8])
    with pytest.raises(ValueError, match="wait until a request ends"):
        first.feed(ids[:, :1])
    assert not first.cache.broken
    other.cache.reset()
    found = first.feed(ids[:, :1], last=True)
    alone = begun(model, "full", ids)
    assert torch.allclose(found, alone.feed(ids[:, :1], last=True), atol=1e-4)
