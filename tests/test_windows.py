"""Layers that see a window hold a window: at every step, and while a prompt comes in pieces."""

import random

import pytest
import torch
from families.models import family
from tiny import begun, prompt, tiny

import kvlab
from kvlab.decode import Stepper
from kvlab.layer import SPARE

WINDOW = 7


@pytest.mark.parametrize("spec", [
    "full", "static:length=80", "paged:block=5", "int4:sinks=4", "fp8", "h2o:budget=5", "topk:budget=3",
    "snapkv:budget=5,window=3", "topk:budget=3,link=1e12", "uvm+h2o:budget=5", "adakv:of=h2o,budget=5",
    "adakv:budget=5", "kvzip:budget=5", "infinigen:budget=3,full_layers=1,pool=5,link=1e12",
])  # fmt: skip
def test_steps_hold_the_window_and_few_empty_slots(spec):
    model = tiny("mistral", sliding_window=WINDOW)
    cache, ids = kvlab.make_cache(model, spec), prompt(70)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids[:, :19])
    exact = "budget" in spec  # tokens are chosen there: none is empty
    for step in range(50):
        stepper.feed(ids[:, 19 + step : 20 + step])
        for layer in cache.layers:
            assert max(layer.rows_held) <= WINDOW
            assert layer.store.length <= WINDOW + (0 if exact else SPARE)


@pytest.mark.parametrize("last", [0, 1, 4])
@pytest.mark.parametrize(
    "spec", ["full", "h2o:budget=5", "snapkv:budget=5,window=4", "tova:budget=5", "offload"]
)
def test_a_prompt_in_pieces_holds_what_somebody_may_still_see(spec, last):
    """Not the whole prompt: the window, what the queries see that vote in the end, and few empty slots."""
    model = tiny("mistral", sliding_window=WINDOW)
    ids, held = prompt(60 + last), []
    cache = kvlab.make_cache(model, spec)
    stepper = kvlab.Stepper(model, cache)
    voters = {"snapkv": 4, "tova": 1}.get(spec.split(":")[0], 0)
    with cache.prefill():
        for start in range(0, 60 + last, 5):
            stepper.feed(ids[:, start : start + 5])
            held.append(max(layer.store.length for layer in cache.layers))
            seen = range(max(0, stepper.ids.shape[1] - voters - WINDOW + 1), stepper.ids.shape[1])
            for layer in cache.layers:  # and nothing that can be seen is missing
                assert set(seen) <= set(layer.positions[0, 0].tolist())
    assert max(held) <= WINDOW + voters + (SPARE if spec == "full" else 0)
    whole = begun(model, spec, ids)
    for step in range(3):
        token = prompt(1, seed=step)
        assert torch.allclose(stepper.feed(token), whole.feed(token), atol=1e-4)


DECIDE = [
    "h2o:budget=0.4", "d2o:budget=0.4", "tova:budget=9", "sinks:budget=0.4", "adakv:of=h2o,budget=0.4",
    "rkv:budget=0.4,window=3,every=4", "offload+h2o:budget=0.4", "uvm+h2o:budget=0.4",
    "infinigen:budget=0.3,pool=0.7,alpha=inf", "h2o:budget=0.4,every=3", "snapkv:budget=0.4,window=4",
    "pyramidkv:budget=0.4,window=4",
]  # fmt: skip
NEXT = {"Llama": lambda at, now: True, "Llama 4": lambda at, now: at // 5 == now // 5}  # what a query may see


@pytest.mark.parametrize("seed", range(24))
def test_after_hold_a_window_alone_lets_go_and_a_file_goes_on(seed, tmp_path):
    """A keep that chooses no more is told of no new slots: it goes on with them, forked, saved or loaded."""
    dice = random.Random(seed)
    name = dice.choice(["Llama", "Llama 4", "Mistral", "Gemma 3"])
    model, rows = kvlab.prepare(family(name)), dice.choice([1, 2])
    stepper = begun(model, dice.choice(DECIDE), prompt(dice.randint(8, 30), rows, seed))
    cache = stepper.cache
    for _ in range(dice.choice([0, 2])):
        stepper.feed(prompt(1, rows, seed))
    cache.hold()
    stepper.fork(torch.arange(rows).repeat(2))
    before = [layer.positions.tolist() for layer in cache.attending]
    start, more = cache.get_seq_length(), [dice.choice([1, 1, 4]) for _ in range(dice.randint(1, 9))]
    for tokens in more:
        stepper.feed(prompt(tokens, 2 * rows, seed))
    now = cache.get_seq_length()
    for layer, old in zip(cache.attending, before, strict=True):
        sees = NEXT.get(name, lambda at, now: at > now - 7) if layer.local else NEXT["Llama"]
        for was, heads in zip(old, layer.positions.tolist(), strict=True):
            for mine, found in zip(was, heads, strict=True):
                stays = {at for at in (*mine, *range(start, now)) if sees(at, now)} | {now - 1}
                assert {*found} - {-1} == stays - {-1}, cache.spec
    cache.save(tmp_path / "held")
    other = Stepper(model, kvlab.load_cache(tmp_path / "held", model))
    mine, theirs = cache.stats(), other.cache.stats()
    assert all(mine[of] == theirs[of] for of in ("device_bytes", "host_bytes", "tokens_held")), cache.spec
    for step in range(9):
        new = prompt(1, 2 * rows, seed + step)
        assert torch.equal(stepper.feed(new), other.feed(new)), cache.spec
    cache.reset()
    again, fresh = Stepper(model, cache), Stepper(model, kvlab.make_cache(model, cache.spec))
    for tokens in (9, 1, 1):  # it chooses again
        new = prompt(tokens, rows, seed)
        assert torch.equal(again.feed(new), fresh.feed(new)), cache.spec


@pytest.mark.parametrize("window", [0, -1, 2**31, 2**40])
def test_a_window_that_is_none_is_refused(window):
    model = family("Mistral")
    model.config.sliding_window = window
    with pytest.raises(ValueError, match=r"sliding_window=.* in layer 0: expected 1 to"):
        kvlab.make_cache(model, "full")
