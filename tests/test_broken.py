"""A pass that breaks off, or comes from another model: noticed before a token is wrong."""

import copy
import random
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from families.models import FAMILIES, LATENT, build, family
from fuzz.alone import bare
from tiny import EACH, begun, interrupt, left_padded, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import kvlab
from kvlab.store import BlockPool, Paged

IDS = torch.randint(2, 96, (1, 14), generator=torch.Generator().manual_seed(3))
HELD = 8
# attention alone, states in layers of their own, states beside attention, other states, a latent
PATHS = ["Llama", "LFM2", "Falcon-H1", "Qwen3-Next", "DeepSeek-V3"]


def interrupted(model, run):
    """Interrupt `run(left)` before and behind every part of the model, once it has put something into the
    list `left`: yields each place, and what was put there."""
    for name, part in model.named_modules():
        for register in (part.register_forward_pre_hook, part.register_forward_hook):
            left = []

            def stop(*args, left=left):
                if left:
                    raise KeyboardInterrupt

            hook = register(stop)
            try:
                run(left)
            except KeyboardInterrupt:
                hook.remove()
                yield f"{name or 'the model'}, {register.__name__}", left[0]
            hook.remove()


def interrupted_at(line: int, run) -> bool:
    """Interrupt `run()` at its line of this number in turns.py; whether it got there."""
    left = [line]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith("turns.py"):
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("spec", ["h2o:budget=0.5", "snapkv:budget=0.4,window=4"])
def test_an_interruption_at_any_line_that_takes_a_pass_for_a_turn(spec):
    """The pass again is right, or the cache is broken."""
    model, turn, steps = (
        kvlab.prepare(family("Llama").double()),
        prompt(5, seed=1),
        prompt(3, seed=2).split(1, 1),
    )
    expected = begun(model, spec, prompt(14))
    bare(expected, model, turn)
    expected, line, broken = [expected.feed(one) for one in steps], 0, 0
    while True:
        stepper, line = begun(model, spec, prompt(14)), line + 1
        if not interrupted_at(line, lambda: bare(stepper, model, turn)):  # noqa: B023 (it is called here)
            break
        if stepper.cache.broken or stepper.cache.get_seq_length() > 14:
            broken += stepper.cache.broken
            continue
        bare(stepper, model, turn)
        for one, right in zip(steps, expected, strict=True):
            torch.testing.assert_close(stepper.feed(one), right, atol=1e-6, rtol=0, msg=f"line {line}")
    assert line > 40 and broken


def by_the_stepper(model, stepper):
    at = stepper.cache.get_seq_length()
    return stepper.feed(IDS[:, at : at + 1])[:, -1], at


def by_a_new_stepper(model, stepper):
    return by_the_stepper(model, kvlab.Stepper(model, stepper.cache))


def by_the_model(model, stepper):
    at = stepper.cache.get_seq_length()
    return model(IDS[:, at : at + 1], past_key_values=stepper.cache).logits[:, -1], at


def by_a_fork(model, stepper):
    stepper.cache.reorder_cache(torch.tensor([0]))
    return by_the_model(model, stepper)


@pytest.mark.parametrize("name", PATHS)
def test_what_follows_an_interrupt_is_right_or_refused(name):
    """In the prompt, or in a step; whoever goes on, with the cache itself or with a copy of it."""
    model, draw = kvlab.prepare(family(name)), random.Random(name)

    def passes(left):
        stepper, amid = kvlab.Stepper(model, kvlab.make_cache(model, "full")), draw.randrange(2)
        for at, ids in enumerate((IDS[:, :HELD], IDS[:, HELD : HELD + 1])):
            left += [stepper] * (at == amid)
            stepper.feed(ids)

    with torch.no_grad():
        expected, refused, places = model(IDS, use_cache=False).logits, 0, 0
        for place, stepper in interrupted(model, passes):
            ways = [by_the_stepper, by_a_new_stepper, by_the_model, by_a_fork]
            ways = ways[places % 4 :] + ways[: places % 4]
            for again in ways:
                given = stepper
                if again is not ways[-1]:  # a copy, so that the next way finds the cache as it was left
                    given = copy.copy(stepper)
                    given.cache = copy.deepcopy(stepper.cache)
                try:
                    logits, at = again(model, given)
                except RuntimeError as error:
                    assert "start again with cache.reset()" in str(error), place
                    refused += 1
                else:
                    assert (logits - expected[:, at]).abs().max() < 1e-4, (place, again)
            places += 1
        assert places > 40 and refused > 80
        stepper.cache.reset()
        found = kvlab.Stepper(model, stepper.cache).feed(IDS)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("at", [0, 1])
def test_padded_knows_where_its_rows_broke_off(at, monkeypatch):
    """They are fed one after the other."""
    model, token = tiny("llama"), prompt(1, rows=2)
    stepper = begun(model, "padded:length=40,chunk=1", prompt(12, rows=2))
    cache = stepper.cache
    feed, rows = cache.engine.feed, []

    def stops(manager, tokens, prompt):
        rows.append(manager)
        if len(rows) > at:
            raise KeyboardInterrupt
        return feed(manager, tokens, prompt)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache.engine, "feed", stops)
        stepper.feed(token)
    for use in (lambda: stepper.feed(token), lambda: cache.crop(-1)):
        with pytest.raises(RuntimeError, match="broke off: start again with"):
            use()
    assert copy.deepcopy(cache).broken
    for wrong in (lambda: cache.crop("x"), lambda: cache.reorder_cache([0])):
        with pytest.raises(TypeError, match="expected a"):
            wrong()
    cache.reset()
    assert kvlab.decode(model, prompt(12, rows=2), cache, 2).tokens.shape == (2, 2)


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


class At(TorchDispatchMode):
    """An interrupt at the k-th operation of torch."""

    def __init__(self, k: int):
        super().__init__()
        self.left = k

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("seed", range(4))
def test_stats_answer_wherever_a_prompt_broke_off(seed):
    model, (ids, mask) = tiny("llama"), left_padded([prompt(12), prompt(7, seed=seed)])
    spec = ("full", "h2o:budget=4", "kvzip:budget=0.5", "int4")[seed]
    whole = At(0)
    with whole:
        kvlab.Stepper(model, kvlab.make_cache(model, spec)).feed(ids, mask)
    for at in random.Random(seed).sample(range(1, -whole.left), 60):
        cache = kvlab.make_cache(model, spec)
        with suppress(KeyboardInterrupt), At(at):
            kvlab.Stepper(model, cache).feed(ids, mask)
        assert cache.stats().tokens_seen in (0, 12)


@pytest.mark.parametrize("moment", ["fork", "crop", "end of the prompt"])
def test_an_interrupt_between_layers_outside_a_pass_is_noticed(moment, monkeypatch, tmp_path):
    model = kvlab.prepare(family("Llama"))
    cache = kvlab.make_cache(model, "full" if moment == "crop" else "h2o:budget=4")
    stepper, second = kvlab.Stepper(model, cache), cache.layers[1]
    with pytest.raises(KeyboardInterrupt):
        with cache.prefill():
            stepper.feed(IDS[:, :HELD])
            if moment == "end of the prompt":
                monkeypatch.setattr(second, "end_prefill", interrupt)
        name = {"fork": "select_rows", "crop": "crop"}[moment]
        monkeypatch.setattr(second.table, name, interrupt)
        stepper.fork(torch.tensor([0])) if moment == "fork" else cache.crop(-2)
    step = partial(model, IDS[:, HELD : HELD + 1], past_key_values=cache)
    for use in (step, lambda: cache.save(tmp_path / "cache")):
        with pytest.raises(RuntimeError, match="broke off: start again with"):
            use()
    monkeypatch.undo()
    cache.reset()
    assert kvlab.decode(model, IDS, cache, 2).tokens.shape == (1, 2)


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


@pytest.mark.parametrize("spec", [spec for spec in EACH if spec not in ("recompute", "padded")])
def test_a_bare_turn_that_broke_off_at_once_opened_nothing(spec):
    """An interrupt before the first layer, or other rows: who goes on does so as if nothing had been."""
    draw, model = random.Random(spec), copy.deepcopy(tiny("llama"))
    for seen in (0, 12):
        cache = kvlab.make_cache(model, spec)
        stepper = kvlab.Stepper(model, cache)
        for tokens in (seen, 1, 1) if seen else ():
            stepper.feed(prompt(tokens, 2))
        before, rows = copy.deepcopy(cache), draw.choice((2, 3)) if seen else 2
        hook = model.model.embed_tokens.register_forward_hook(interrupt) if rows == 2 else None
        with pytest.raises((KeyboardInterrupt, ValueError)):
            model(prompt(draw.randint(2, 5), rows), past_key_values=cache)
        if hook:
            hook.remove()
        if draw.random() < 0.5:
            draw.choice((copy.deepcopy, kvlab.KVCache.stats))(cache)
        later = [prompt(1, 2, 6), *[prompt(3, 2, 7)] * ("zip" not in spec)]
        for ids in later if seen else [prompt(12, 2, 5), *later]:
            found, right = (model(ids, past_key_values=one).logits for one in (cache, before))
            assert torch.equal(found, right)
        assert cache.stats() == before.stats()


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
