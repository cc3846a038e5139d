"""The simulator, against schedules worked out by hand and against what the modelled link recorded."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvlab.arithmetic import MACHINES, SHAPES
from kvlab.measure.simulate import AHEAD, NEEDED, NEVER, REHEARSED, Work, simulate
from kvlab.place import ModelledLink

LINK = ModelledLink(1.0, latency=0)  # a byte a second
A6000, OPT = MACHINES["A6000-PCIe3"], SHAPES["OPT-13B"]


def layers(ask, fetch=0, write=0, selection=0.0, count=3):
    return [Work(1.0, 2.0, 3.0, selection, ask, fetch, write) for _ in range(count)]


def test_short_transfers_hide_behind_the_layer_before():
    timeline = simulate([layers(AHEAD, 5)] * 2, LINK)  # 5 s, asked for with 2 + 3 + 1 s to go
    assert timeline.total("stall") == 4  # the very first, asked for at 0 and needed at 1
    assert timeline.seconds == 36 + 4


def test_long_transfers_set_the_pace():
    timeline = simulate([layers(AHEAD, 10)] * 2, LINK)
    assert timeline.seconds == 6 * 10 + 2 + 3  # then the last layer still attends
    fetches = [span for span in timeline.transfers]
    assert [f.start for f in fetches] == [0, 10, 20, 30, 40, 50]


def test_a_late_choice_is_waited_for():
    timeline = simulate([layers(NEEDED, 5, selection=0.5)] * 2, LINK)
    assert timeline.seconds == 6 * (6 + 0.5 + 5)
    assert timeline.total("stall") == 30


def test_a_rehearsal_hides_the_same_transfer():
    chosen = [layers(NEVER, count=1)[0], *layers(REHEARSED, 5, selection=0.5, count=2)]
    timeline = simulate([chosen] * 2, LINK)
    assert timeline.total("stall") == 0
    assert timeline.seconds == 2 * (3 * 6 + 2 * 0.5)


@given(
    asks=st.lists(st.sampled_from([AHEAD, NEEDED, NEVER, REHEARSED]), min_size=1, max_size=5),
    fetch=st.integers(1, 40), write=st.integers(0, 9), steps=st.integers(1, 4),
    parts=st.tuples(*[st.integers(1, 9)] * 4),
)  # fmt: skip
def test_whatever_the_work(asks, fetch, write, steps, parts):
    if asks[0] == REHEARSED:
        asks[0] = NEVER  # nothing runs before the first layer
    project, attention, ffn, selection = parts
    row = [
        Work(project, attention, ffn, selection if ask in (NEEDED, REHEARSED) else 0, ask,
             0 if ask == NEVER else fetch, 0 if ask == NEVER else write)
        for ask in asks
    ]  # fmt: skip
    timeline = simulate([row] * steps, LINK)
    spent = sum(w.project + w.attention + w.ffn + w.selection for w in row) * steps
    assert timeline.seconds == spent + timeline.total("stall")
    moved = sum(w.fetch for w in row) * steps
    inward = [s for s in timeline.transfers if s.lane == "to device"]
    assert sum(s.bytes for s in inward) == moved
    assert timeline.seconds >= max(spent, sum(s.seconds for s in inward))
    for a, b in pairwise(inward):
        assert b.start >= a.end
    for a, b in pairwise(timeline.compute):
        assert b.start == a.end
    attends = {(s.step, s.layer): s.start for s in timeline.compute if s.what == "attention"}
    for s in inward:
        early = s.layer == 0 and s.what == "prefetch" and s.submitted > 0
        assert s.end <= attends[s.step + early, s.layer]
