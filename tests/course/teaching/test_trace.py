"""What `held_by_step` writes down is what the cache holds."""

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from course.teaching.pictures import EVICTED, NOTHING
from course.teaching.trace import held_by_step

STEPS = 5


@pytest.mark.parametrize("method", ["full", "h2o:budget=0.3", "sinks:budget=6", "int4", "topk:budget=0.3"])
def test_states_agree_with_the_cache_at_the_end(method):
    layer, head = 2, 1
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
