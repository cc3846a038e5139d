"""Timelines of decode steps: what is asked for when, and that every moment belongs to something."""

import pytest
from tiny import linked, prompt, tiny

import kvlab
from kvlab.measure.timeline import record


def steps_of(spec, steps=3):
    model = tiny("llama")
    cache = kvlab.make_cache(model, linked(spec, "2e7"))
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(60))
    with record(model, cache) as timeline:
        for step in range(steps):
            stepper.feed(prompt(1, seed=step))
    return timeline


def attention_of(timeline, step, layer):
    return [s for s in timeline.compute if (s.what, s.step, s.layer) == ("attention", step, layer)]


@pytest.mark.parametrize("spec, first", [("offload", 1), ("infinigen:budget=0.4,alpha=inf", 2)])
def test_transfers_for_the_next_layer_are_under_way_during_this_one(spec, first):
    """Asked for before this layer attends; waited for only when the next one does."""
    timeline = steps_of(spec)
    for step in range(3):
        for layer in range(first, 3):
            attends = attention_of(timeline, step, layer - 1)
            ffn = [s for s in timeline.compute if (s.what, s.step, s.layer) == ("ffn", step, layer - 1)]
            (transfer,) = [
                t for t in timeline.transfers if t.what == "prefetch" and (t.step, t.layer) == (step, layer)
            ]
            assert transfer.submitted <= attends[-1].start < attends[-1].end <= ffn[-1].start
            stalls = [s for s in timeline.compute if (s.what, s.step, s.layer) == ("stall", step, layer)]
            assert min(s.start for s in stalls) >= ffn[-1].end


def test_a_whole_layer_is_asked_for_right_behind_the_last_rehearsal():
    """Not while the last layer attends: what the link is to carry longest, it begins as early as it may."""
    timeline = steps_of("infinigen:budget=0.4")
    for step in range(2):
        begins = min(s.start for s in timeline.compute if (s.step, s.layer) == (step, 1))
        attends = attention_of(timeline, step, 1)
        last, first = [
            next(t for t in timeline.transfers if t.what == "prefetch" and (t.step, t.layer) == (step, layer))
            for layer in (2, 0)
        ]
        assert begins <= last.submitted <= first.submitted <= attends[0].start


def test_top_k_must_choose_before_it_can_fetch():
    timeline = steps_of("topk:budget=0.4")
    for step in range(3):
        for layer in range(3):
            (chosen,) = [
                s for s in timeline.compute if (s.what, s.step, s.layer) == ("selection", step, layer)
            ]
            (transfer,) = [
                t for t in timeline.transfers if t.what == "fetch" and (t.step, t.layer) == (step, layer)
            ]
            (wait,) = [s for s in timeline.compute if (s.what, s.step, s.layer) == ("stall", step, layer)]
            assert chosen.end <= transfer.submitted <= wait.start and transfer.end <= wait.end
