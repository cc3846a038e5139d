"""An interruption anywhere in a pass, or outside of one: what follows is right, or refused."""

import copy
import random
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from families.models import family
from fuzz.alone import bare
from tiny import EACH, begun, interrupt, left_padded, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import kvlab

IDS = torch.randint(2, 96, (1, 14), generator=torch.Generator().manual_seed(3))
HELD = 8
KVLAB = str(Path(kvlab.__file__).parent)
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


def interrupted_at(line: int, run, where: str = "turns.py") -> int:
    """Interrupt `run()` at its line of this number in kvlab's files of this name; how many were left."""
    left = [line]

    def trace(frame, event, _):
        name = frame.f_code.co_filename
        if not (KVLAB in name and name.endswith(where)):
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()  # coverage's
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return 0
    finally:
        sys.settrace(before)
    return left[0]


@pytest.mark.parametrize("how", ["pieces", "block", "turn", "reset"])
@pytest.mark.parametrize("seed", range(2))
def test_an_interruption_at_a_drawn_line_where_a_prompt_ends_is_noticed(seed, how):
    """Or where everything is forgotten: what follows is right, or refused."""
    model, draw, refused = kvlab.prepare(family("Llama").double()), random.Random(f"{seed} {how}"), 0
    step = lambda cache, tokens, seed: model(prompt(tokens, seed=seed), past_key_values=cache).logits
    fed = {
        "pieces": ((8, 1), (5, 2)),
        "block": ((8, 1), (5, 2)),
        "turn": ((13, 1), (1, 3), (5, 9)),
        "reset": ((14, 1),),
    }[how]
    specs = [one for one in EACH if one not in ("recompute", "padded") and "zip" not in one]
    for spec in draw.sample(specs, 5):

        def begun_again(spec=spec):
            cache = kvlab.make_cache(model, spec)
            cache.block = cache.prefill()
            if how == "block":
                cache.block.__enter__()
            for one in fed:
                step(cache, *one)
            return cache

        def goes_on(cache):
            later = [(12, 5), (1, 6), (1, 7)] if how == "reset" else [(1, 3), (1, 5), (1, 6)]
            return torch.cat([step(cache, *one)[:, -1] for one in later])

        run = {"reset": kvlab.KVCache.reset, "block": lambda cache: cache.block.__exit__(None, None, None)}
        run = run.get(how, kvlab.KVCache.stats)
        with torch.no_grad():
            run(cache := begun_again())
            right = goes_on(cache)
            lines = 10**6 - interrupted_at(10**6, partial(run, begun_again()), ".py")
            for line in draw.sample(range(1, lines), 12):
                cache = begun_again()
                interrupted_at(line, partial(run, cache), ".py")
                if cache.broken:
                    refused += 1
                    cache.reset()
                    continue
                if how == "reset" and cache.get_seq_length():
                    cache.reset()
                if how == "block" and cache.attending[0].in_prompt:  # as after an error in the block
                    with cache.prefill():
                        pass
                torch.testing.assert_close(goes_on(cache), right, atol=1e-6, rtol=0, msg=f"{spec}, {line}")
    assert refused or how == "turn"  # which changes nothing for many methods


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
        if interrupted_at(line, lambda: bare(stepper, model, turn)):  # noqa: B023 (it is called here)
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
    for use in (step, lambda: cache.save(tmp_path / "cache"), lambda: cache.crop(-1)):
        with pytest.raises(RuntimeError, match="broke off: start again with"):
            use()
    monkeypatch.undo()
    cache.reset()
    assert kvlab.decode(model, IDS, cache, 2).tokens.shape == (1, 2)


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
