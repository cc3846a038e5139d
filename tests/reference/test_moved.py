"""The bytes that places move at every step, by their definition, over a link and without one."""

import pytest
from reference.definitions import place
from reference.driven import KV_HEADS, Driven, check, keep_all
from reference.keeps import by_h2o


@pytest.mark.parametrize("name, exact, given, bits", [
    ("quest+int8", "quest", "budget=0.4,page=3,full_layers=0", 8),
    ("quest+int8", "quest", "budget=0.4,page=3,full_layers=0,link=1e12", 8),
    ("infinigen+int4", "infinigen", "budget=9,alpha=0.4,full_layers=1", 4),
])  # fmt: skip
def test_over_integers_the_same_tokens_are_fetched_in_fewer_bytes(name, exact, given, bits):
    run, other = (Driven(f"{one}:{given}", layers=2).run() for one in (name, exact))
    for (_, seen), (_, right) in zip(run.seen[1:], other.seen[1:], strict=True):
        assert seen.attended == right.attended
        slots = sum(len(head) - 1 for row in seen.attended for head in row)
        assert seen.moved == place.moved(slots, 2, KV_HEADS, place.token_bytes(20, bits, 1))


FIXED = 2 * 20 * 4  # bytes of K and V of one token and head, fp32


@pytest.mark.parametrize("spec, size", [
    ("offload", FIXED),
    ("offload:link=1e12", FIXED),
    ("offload+int4", place.token_bytes(20, 4, 1)),
    ("offload+int4:group=5,link=1e12", place.token_bytes(20, 4, 4)),
    ("uvm:memory=0", FIXED),
])  # fmt: skip
def test_bytes_of_those_that_fetch_everything(spec, size):
    sizes = (31, 9)
    run = Driven(spec, sizes, layers=2).run()
    for step, seen in enumerate(run.seen):
        for found in seen:
            past = [] if step == 0 else [(tokens + step - 1) * KV_HEADS for tokens in sizes]
            new = sizes if step == 0 else (1, 1)
            expected = sum(place.moved(slots, 0, KV_HEADS, size) for slots in past)
            assert found.moved == expected + sum(place.moved(0, n, KV_HEADS, size) for n in new)


@pytest.mark.parametrize("spec", ["topk:budget=0.2", "infinigen:budget=9,alpha=0.4,full_layers=1,link=1e12"])
def test_bytes_of_those_that_choose(spec):
    """What was fetched, the newest token left out, and what was written back."""
    run = Driven(spec, (31, 9), layers=2).run()
    for seen in run.seen[1:]:
        for found in seen:
            slots = sum(len(head) - 1 for row in found.attended for head in row)
            assert found.moved == place.moved(slots, 2, KV_HEADS, FIXED)


@pytest.mark.parametrize(
    "spec, budget, memory", [("uvm+h2o:budget=11,memory=0.5", 11, 15), ("uvm:memory=40", 99, 40)]
)
def test_unified_memory(spec, budget, memory):
    """What fits is fetched once; H2O holds what it would hold anywhere."""
    run = Driven(spec, (31,)).run()
    check(run, by_h2o(11, 0.5) if "h2o" in spec else keep_all)
    touched = False
    for step, (found,) in enumerate(run.seen[1:], 1):
        held = min(31 + step - 1, budget)
        there = place.on_device(held + 1, memory, touched)
        touched = held + 1 <= memory
        assert found.moved == (0 if there else place.moved(held * KV_HEADS, 1, KV_HEADS, FIXED))


@pytest.mark.parametrize("spec", ["offload+h2o:budget=11", "offload+h2o:budget=11,link=1e12"])
def test_h2o_on_a_host(spec):
    run = Driven(spec, layers=2).run()
    for layer in range(2):
        check(run, by_h2o(11, 0.5), layer=layer)
    for found in run.seen[15]:  # both rows are full
        assert found.moved == place.moved(2 * 11 * KV_HEADS, 2, KV_HEADS, FIXED)
