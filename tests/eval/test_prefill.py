"""One prefill for many caches: a filled cache is the one that was prefilled."""

import gc
import weakref
from types import SimpleNamespace

import numba
import pytest
import torch

import kvlab
from eval.accuracy import KVLabLM, clock, prefill
from eval.accuracy.prefill import shared
from eval.accuracy.scoring import Scorer
from kvlab.decode import Stepper

METHODS = [method for method in kvlab.FIRST_WAVE if method != "recompute"]
METHODS += ["adakv:of=h2o", "kvzip:chunk=16"]


@pytest.mark.parametrize("rows_at_once, padded", [(1, True), (2, True), (3, False)])
def test_a_filled_cache_is_a_prefilled_one(loaded, padded, rows_at_once, monkeypatch):
    monkeypatch.setattr(prefill, "TOKENS", 40 * rows_at_once)
    model = loaded[0]
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 400, (3, 40)), None
    if padded:
        mask = (torch.arange(40) >= torch.tensor([0, 9, 31])[:, None]).long()
    caches = {method: kvlab.make_cache(model, method) for method in METHODS}
    for method, stepper, logits in shared(model, caches, ids, mask, last=True):
        cache = kvlab.make_cache(model, method)
        own = Stepper(model, cache)
        assert torch.allclose(own.feed(ids, attention_mask=mask, last=True), logits, atol=1e-5)
        assert cache.stats() == stepper.cache.stats()
        for mine, theirs in zip(cache.layers, stepper.cache.layers, strict=True):
            assert torch.equal(mine.positions, theirs.positions)
        rows = torch.tensor([0, 2, 2, 1])
        for each in (own, stepper):
            each.fork(rows)
        for token in (5, 7):
            fed = torch.full((4, 1), token)
            assert torch.allclose(own.feed(fed), stepper.feed(fed), atol=1e-5), method
            assert own.cache.stats() == stepper.cache.stats()


def test_a_prompt_frees_its_bytes_when_it_is_let_go(loaded):
    """Not when Python's collector comes by, which counts objects: a gigabyte a batch would pile up."""
    gc.collect()
    gc.disable()
    try:
        prompt = prefill.Prompt(loaded[0], torch.randint(0, 400, (2, 40)), None, True)
        received = prompt.received(0, 8)
        assert prompt.received(0, 8) is received  # computed once
        left = [weakref.ref(x) for x in (prompt, received, *(layer.query for layer in prompt.layers))]
        del prompt, received
        assert not any(one() is not None for one in left)
    finally:
        gc.enable()


def test_together_gives_what_each_method_gives_alone(asked, loaded):
    together, methods = KVLabLM(loaded[0], tokenizer=loaded[1]), kvlab.FIRST_WAVE[::2]
    together.together(methods)
    for method in methods:
        together.use(method)
        alone = KVLabLM(loaded[0], method, tokenizer=loaded[1])
        found = []
        for lm in (together, alone):
            choices = lm.loglikelihood(asked.choices[:9], disable_tqdm=True)
            rolling = lm.loglikelihood_rolling(asked.stories[:2], disable_tqdm=True)
            words = lm.generate_until(asked.prompts, disable_tqdm=True)
            bytes_held = {} if method == "recompute" else lm.meter.means()
            found.append(([score for score, _ in choices] + rolling, words, bytes_held))
        assert found[0][0] == pytest.approx(found[1][0], abs=2e-2), method
        assert found[0][1:] == found[1][1:], method


def test_what_is_compiled_once_is_nobodys_time(monkeypatch):
    """Else the first cell of a fresh machine takes 46 seconds, and the next one a third of a second."""
    before = clock.compiled()
    numba.njit(lambda x: x + 1)(1)
    assert clock.compiled() > before
    now, compiled = [0.0], [30.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(clock, "compiled", lambda: compiled[0])
    watch = clock.Clock()
    with watch.of("full"):
        now[0], compiled[0] = 46.0, 70.0
        with watch.of(None):
            now[0], compiled[0] = 50.0, 71.0
        now[0] = 52.0
    watch.stop()
    assert (watch.own["full"], watch.prepared, watch.shared, watch.total) == (8.0, 41.0, 3.0, 52.0)


def test_seconds_are_each_methods_own_and_the_prefill_is_apart(asked, loaded, monkeypatch):
    """On a clock that only known work moves: 100 for a pass over prompts, 1 or 5 for a method's step."""
    now, steps, passes = [0.0], {"h2o": 0, "sinks": 0}, []
    costs = {"h2o": 1, "sinks": 5}
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    true_prompt, true_step = prefill.Prompt.__init__, Scorer.step

    def prompt(self, *arguments):
        now[0] += 100
        passes.append(now[0])
        true_prompt(self, *arguments)

    def step(self, name, *arguments):
        now[0] += costs[name]
        steps[name] += 1
        return true_step(self, name, *arguments)

    monkeypatch.setattr(prefill.Prompt, "__init__", prompt)
    monkeypatch.setattr(Scorer, "step", step)
    lm = KVLabLM(loaded[0], tokenizer=loaded[1])
    lm.together(costs)
    for method, cost in costs.items():  # the first one asked for waits for all
        begun = now[0]
        lm.use(method)
        lm.loglikelihood(asked.choices, disable_tqdm=True)
        now[0] += 3  # what lm-eval does with the answers
        found = lm.seconds(now[0] - begun)
        shared = {"prefill_seconds": 100 * len(passes), "together": 2}
        assert steps[method] and found == {"seconds": steps[method] * cost + 3} | shared
