"""AdaKV over every method that scores: the budget is met to the token, and a row is the row alone."""

import pytest
import torch
from reference.definitions import keep
from reference.driven import Driven, check
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.keep import H2O, AdaKV, KeyDiff, KeyNorm, SnapKV
from kvlab.methods import METHODS

SIZES = (50, 21, 34)


def scoring() -> list[str]:
    """Methods that `adakv` takes."""
    found = []
    for name in METHODS:
        try:
            kvlab.make_cache(tiny("llama"), f"adakv:of={name}")
        except ValueError as error:
            assert "\n" not in str(error) and "of=" in str(error)
        else:
            found.append(name)
    return found


def test_what_scores_is_taken_and_what_does_more_is_not():
    found = scoring()
    assert {"sinks", "h2o", "snapkv", "tova", "pyramidkv", "keydiff", "keynorm", "random"} <= set(found)
    assert not {"full", "int4", "paged", "topk", "offload+h2o", "adakv", "kvzip", "d2o"} & set(found)


@pytest.mark.parametrize("name", scoring())
@torch.no_grad()
def test_any_score_can_share_a_budget(name):
    model, spec = tiny("llama", dtype=torch.float64), f"adakv:of={name},budget=0.4"
    prompts = [prompt(size, seed=size) for size in SIZES]
    ids, mask = left_padded(prompts)
    cache = kvlab.make_cache(model, spec)
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    even = kvlab.make_cache(model, f"{name}:budget=0.4")
    kvlab.Stepper(model, even).feed(ids, mask)
    for layer, other in zip(cache.layers, even.layers, strict=True):
        held, evenly = ((one.positions >= 0).sum((1, 2)).tolist() for one in (layer, other))
        assert held == evenly  # of a layer and a row, over its heads
        least = [max(1, int(0.2 * (count // 2))) for count in evenly]
        assert all((layer.positions >= 0).sum(-1).amin(-1) >= torch.tensor(least))
    later = [prompt(1, rows=3, seed=step) for step in range(4)]
    together = torch.stack([stepper.feed(token, last=True) for token in later], 1)
    for row, one in enumerate(prompts):
        alone = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        alone.feed(one)
        mine = torch.cat([alone.feed(token[row : row + 1], last=True) for token in later])
        assert torch.allclose(together[row], mine, atol=1e-6)
        for layer, other in zip(cache.layers, alone.cache.layers, strict=True):
            held, evenly = ([[p for p in head if p >= 0] for head in one.tolist()]
                            for one in (layer.positions[row], other.positions[0]))  # fmt: skip
            assert held == evenly


def by_likeness(budget, every):
    """As `keydiff`, each time that so many tokens have come on top of the shares."""

    def start(row):
        limit, shares = keep.budget(budget, row.prompt), []

        def held_after(new, present, attended):
            if new[0] == 0:
                scores = []
                for head, mine in enumerate(present):
                    units = [key / key.norm() for key in row.keys[head, mine].double()]
                    anchor = sum(units) / len(units)
                    scores.append([-float(unit @ anchor / anchor.norm()) for unit in units])
                shares[:] = keep.adakv(scores, limit, 0.2)
            on_top = max(len(mine) for mine in present) - max(shares)
            if on_top < (every if new[0] else 1):
                return present
            return [
                [mine[i] for i in keep.keydiff(row.keys[head, mine].double(), shares[head])]
                for head, mine in enumerate(present)
            ]

        return held_after

    return start


@pytest.mark.parametrize("passes", [(1,) * 40, (1,) * 9 + (4,) + (1,) * 17])
@pytest.mark.parametrize("budget", [0.4, 9])
def test_now_and_then(budget, passes):
    run = Driven({"keep": AdaKV(KeyDiff(budget, every=7))}, passes=passes).run()
    check(run, by_likeness(budget, 7))
    assert budget == 9 or any(len(row[0]) != len(row[1]) for row in run.seen[-1][0].kept)


def test_chunks():
    """Heads compete with the means of chunks, and of the last chunk the first tokens stay."""

    def start(row):
        limit = keep.budget(0.4, row.prompt)

        def held_after(new, present, attended):
            if new[0] > 0:
                return present
            worth = [[-round(float(key.norm()), 3) for key in keys.double()] for keys in row.keys]
            worth = [one[: row.prompt] for one in worth]
            means = []
            for one in worth:
                chunks = [one[at : at + 3] for at in range(0, row.prompt - 1, 3)]
                chunks[-1] = one[len(chunks) * 3 - 3 : row.prompt - 1]  # the newest is none of its chunk's
                means.append([sum(chunk) / len(chunk) for chunk in chunks for _ in chunk] + [0.0])
            shares = keep.adakv(means, limit, 0.2)
            return [keep.by_chunk(*pair) for pair in zip(worth, [set()] * 2, [3] * 2, shares, strict=True)]

        return held_after

    run = Driven({"keep": AdaKV(KeyNorm(0.4, chunk_length=3))}).run()
    check(run, start)
    assert any(len(row[0]) != len(row[1]) for row in run.seen[-1][0].kept)


@pytest.mark.parametrize("kind, given", [
    (H2O, {"every": 5}), (SnapKV, {"chunk_length": 4}), (KeyDiff, {"renumber": True}),
    (KeyDiff, {"every": 5}),
])  # fmt: skip
@torch.no_grad()
def test_what_a_keep_is_told_besides_holds_under_adakv(kind, given):
    """With even shares it is that keep itself; what it is told changes something."""
    found, model = [], tiny("llama", dtype=torch.float64)
    own = {"window": 3} if kind is SnapKV else {}
    for made in (AdaKV(kind(0.4, **own, **given), 1), kind(0.4, **own, **given), kind(0.4, **own)):
        stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=made))
        stepper.feed(prompt(30))
        found.append(torch.cat([stepper.feed(prompt(1, seed=step), last=True) for step in range(12)]))
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[1], found[2], atol=1e-3)
