"""What `held_by_step` writes down is what the cache holds."""

from __future__ import annotations

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from course.teaching.pictures import EVICTED, FETCHED, HOST, KEPT, NOTHING, QUANTIZED
from course.teaching.trace import held_by_step
from kvlab.keep import H2O
from kvlab.place import Host

STEPS = 5


@pytest.mark.parametrize("method", ["full", "h2o:budget=0.3", "sinks:budget=6", "int4", "topk:budget=0.3"])
def test_states_agree_with_the_cache_at_the_end(method):
    layer, head = 3, 1
    model, ids = tiny("llama"), prompt(17)
    cache = kvlab.make_cache(model, method)
    seen = held_by_step(model, ids, cache, STEPS, layer=layer, head=head)
    trace = kvlab.decode(model, ids, kvlab.make_cache(model, method), STEPS)
    assert torch.equal(seen.generated, trace.tokens[0])
    assert torch.equal(seen.ids, torch.cat([ids[0], trace.tokens[0, :-1]]))
    assert seen.states.shape == (STEPS, 17 + STEPS - 1)
    for step in range(STEPS):
        assert ((seen.states[step] == NOTHING) == (torch.arange(17 + STEPS - 1) >= 17 + step)).all()
    held = sorted(cache.layers[layer].positions[0, head].tolist())
    assert (seen.states[-1] != EVICTED).nonzero().flatten().tolist() == held


def test_each_kind_of_state_appears_where_it_should():
    model, ids = tiny("llama"), prompt(20)
    kinds = lambda method: set(held_by_step(model, ids, method, STEPS).states[-1].tolist())
    assert kinds("full") == {KEPT}
    assert kinds("int8") == {QUANTIZED}
    assert kinds("h2o:budget=0.5") == {KEPT, EVICTED}
    assert kinds("topk:budget=0.2") == {HOST, FETCHED, KEPT}


def test_topk_fetches_its_budget_and_evicts_nothing():
    seen = held_by_step(tiny("llama"), prompt(20), "topk:budget=4", STEPS)
    assert [seen.count(FETCHED, step) for step in range(STEPS)] == [0, 4, 4, 4, 4]
    assert seen.count(EVICTED) == 0
    assert seen.count(HOST, 0) == 20


def test_an_offloaded_keep_shows_both():
    model = tiny("llama")
    cache = kvlab.KVCache(model, keep=H2O(budget=8), place=Host())
    seen = held_by_step(model, prompt(20), cache, STEPS)
    assert seen.count(FETCHED) == 8  # all it held; of these one left after the step
    assert seen.count(KEPT) == 1
    assert seen.count(EVICTED) + seen.count(FETCHED) + 1 == 24


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"layer": 9}, "layer=9"),
        ({"head": 7}, "head=7"),
        ({"ids": prompt(5, rows=2)}, "ids"),
        ({"method": "recompute"}, "recompute"),
    ],
)
def test_wrong_requests_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        held_by_step(**({"model": tiny("llama"), "ids": prompt(9), "method": "full"} | wrong))
