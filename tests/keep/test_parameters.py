"""What every keep takes besides its own: chunks, compressing now and then, renumbering."""

import pytest
import torch
from reference.definitions import attention, keep
from reference.driven import Driven, check
from reference.keeps import by_keydiff, by_sinks, once
from tiny import FAMILIES, begun, left_padded, prompt, tiny

import kvlab
from kvlab.keep import AdaKV, KeyDiff
from kvlab.methods import METHODS

TAKE = [name for name, method in METHODS.items() if "every" in method.parameters]


def by_chunk(budget, chunk, values, stays=lambda tokens: set()):
    """values(keys `[tokens, head_dim]`, KV head) -> what each token is worth."""

    def choose(row, head, mine, limit):
        worth = values(row.keys[head, mine].double(), head)
        return mine if len(mine) <= limit else keep.by_chunk(worth, stays(len(worth)), chunk, limit)

    return once(budget, choose)


def by_every(start, budget, every):
    """As the definition `start`, each time that so many tokens have come on top."""

    def begin(row):
        limit, follow = keep.budget(budget, row.prompt), start(row)

        def held_after(new, present, attended):
            due = len(present[0]) - limit >= every or (new[0] == 0 and len(present[0]) > limit)
            return follow([0, *new], present, attended) if due else present

        return held_after

    return begin


def drawn(keys, head):
    return [float(keep._hash(keep._hash(0 ^ keep._hash(head)) ^ token) >> 8) for token in range(len(keys))]


def shortest(keys, head):
    return [-round(float(key.norm()), 3) for key in keys]


@pytest.mark.parametrize("spec, by", [
    ("random:budget=0.4,chunk=4", by_chunk(0.4, 4, drawn)),
    ("random:budget=11,chunk=50", by_chunk(11, 50, drawn)),
    ("keynorm:budget=0.4,chunk=3", by_chunk(0.4, 3, shortest)),
])  # fmt: skip
def test_chunks(spec, by):
    check(Driven(spec).run(), by)


@pytest.mark.parametrize("passes", [(1,) * 40, (1,) * 9 + (4,) + (1,) * 17])
@pytest.mark.parametrize("spec, by, budget, every", [
    ("sinks:budget=9,every=5", by_sinks(9, 4), 9, 5),
    ("sinks:budget=0.4,every=1", by_sinks(0.4, 4), 0.4, 1),
    ("keydiff:budget=0.4,every=7", by_keydiff(0.4), 0.4, 7),
])  # fmt: skip
def test_every_so_many_steps(spec, by, budget, every, passes):
    run = Driven(spec, passes=passes)
    check(run.run(), by_every(by, budget, every))


@pytest.mark.parametrize("name", TAKE)
def test_what_compresses_now_and_then_chooses_in_a_padded_batch_as_alone(name):
    """After passes of several tokens, when a shorter row has empty slots between old tokens and new ones."""
    model, spec = tiny("llama", dtype=torch.float64), f"{name}:budget=0.4,every=3"
    spec += ",chunk=2" if "chunk" in METHODS[name].parameters else ""
    spec += ",window=4" if "window" in METHODS[name].parameters else ""
    prompts = [prompt(size, seed=size) for size in (28, 17, 22)]
    ids, mask = left_padded(prompts)
    both = begun(model, spec, (ids, mask))
    together = both.cache
    single = [kvlab.Stepper(model, kvlab.make_cache(model, spec)) for _ in prompts]
    for one, ids in zip(single, prompts, strict=True):
        one.feed(ids)
    for at, count in enumerate((18, 2, 5, 1, 7)):
        new = prompt(count, rows=3, seed=at)
        both.feed(new)
        for row, one in enumerate(single):
            one.feed(new[row : row + 1])
            for mine, alone in zip(together.layers, one.cache.layers, strict=True):
                held = [[p for p in head if p >= 0] for head in mine.positions[row].tolist()]
                assert held == alone.positions[0].tolist(), f"row {row} after {count} tokens"


@pytest.mark.parametrize("spec", [
    "sinks:budget=9,renumber=true", "h2o:budget=0.4,renumber=true,every=3",
    pytest.param({"keep": AdaKV(KeyDiff(0.4, renumber=True, every=3))}, id="adakv"),
])  # fmt: skip
def test_renumbered_attention_is_its_definition(spec):
    """Queries and keys rotated for their places in the cache give the same outputs."""
    run, frequencies = Driven(spec), [10000.0 ** (-2 * i / 20) for i in range(10)]
    run.run()
    moved = 0
    for index, row in enumerate(run.rows()):
        for step, new in run.positions_of(index):
            if step == 0:
                continue
            seen, (at,) = run.seen[step][0], new
            for head, over in enumerate(seen.attended[index]):
                keys = keep.renumbered(row.keys[head, over], over, frequencies)
                moved += over != list(range(at + 1 - len(over), at + 1))
                for q in range(row.group(head).start, row.group(head).stop):
                    before = keep.rotation(at, frequencies, 20).T @ row.query[q, at].double()
                    query = keep.rotation(len(over) - 1, frequencies, 20) @ before
                    out = attention.attend(query, keys, row.values[head, over].double(), row.scaling)
                    assert torch.allclose(seen.out[index, q, 0].double(), out, atol=1e-4)
    assert moved > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_moves_where_nothing_is_missing(family):
    """Before anything goes, a cache with renumbering is the full one; without RoPE it is refused."""
    model = tiny(family)
    if family in ("opt", "gpt2"):
        with pytest.raises(ValueError, match=r"has no rotary embedding \(RoPE\)"):
            kvlab.make_cache(model, "sinks:renumber=true")
        return
    full, other = (kvlab.make_cache(model, spec) for spec in ("full", "sinks:budget=60,renumber=true"))
    one, two = kvlab.Stepper(model, full), kvlab.Stepper(model, other)
    assert torch.equal(one.feed(prompt(20)), two.feed(prompt(20)))
    for step in range(5):
        token = prompt(1, seed=step)
        assert torch.allclose(one.feed(token), two.feed(token), atol=1e-5)
