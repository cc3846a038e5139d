"""Timelines of decode steps: what is asked for when, and that every moment belongs to something."""

import pytest
from tiny import begun, linked, prompt, tiny

from kvlab.measure.timeline import record


def steps_of(spec, steps=3):
    model = tiny("llama")
    stepper = begun(model, linked(spec, "2e7"), prompt(60))
    cache = stepper.cache
    with record(model, cache) as timeline:
        for step in range(steps):
            stepper.feed(prompt(1, seed=step))
    return timeline


def found(spans, what, step, layer):
    """Those of this kind, step and layer."""
    return [one for one in spans if (one.what, one.step, one.layer) == (what, step, layer)]


@pytest.mark.parametrize("spec, first", [("offload", 1), ("infinigen:budget=0.4,alpha=inf", 2)])
def test_transfers_for_the_next_layer_are_under_way_during_this_one(spec, first):
    """Asked for before this layer attends; waited for only when the next one does."""
    timeline = steps_of(spec)
    for step in range(3):
        for layer in range(first, 3):
            attends, ffn = (found(timeline.compute, what, step, layer - 1) for what in ("attention", "ffn"))
            (transfer,) = found(timeline.transfers, "prefetch", step, layer)
            assert transfer.submitted <= attends[-1].start < attends[-1].end <= ffn[-1].start
            assert min(one.start for one in found(timeline.compute, "stall", step, layer)) >= ffn[-1].end


def test_a_whole_layer_is_asked_for_right_behind_the_last_rehearsal():
    """Not while the last layer attends: what the link is to carry longest, it begins as early as it may."""
    timeline = steps_of("infinigen:budget=0.4")
    for step in range(2):
        begins = min(s.start for s in timeline.compute if (s.step, s.layer) == (step, 1))
        attends = found(timeline.compute, "attention", step, 1)
        last, first = (found(timeline.transfers, "prefetch", step, layer)[0] for layer in (2, 0))
        assert begins <= last.submitted <= first.submitted <= attends[0].start


def test_top_k_must_choose_before_it_can_fetch():
    timeline = steps_of("topk:budget=0.4")
    for step in range(3):
        for layer in range(3):
            (chosen,), (wait,) = (found(timeline.compute, w, step, layer) for w in ("selection", "stall"))
            (transfer,) = found(timeline.transfers, "fetch", step, layer)
            assert chosen.end <= transfer.submitted <= wait.start and transfer.end <= wait.end
