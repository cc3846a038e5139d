"""Every fetch against its definition: what is fetched at each of forty steps, outputs, bytes moved."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.definitions import keep, place
from reference.driven import KV_HEADS, Driven, check, keep_all
from reference.keeps import by_h2o, by_pool, by_topk

from kvlab.attention import recorded
from kvlab.keep import H2O
from kvlab.models import calibration_ids
from kvlab.place import Host, Quest

MIXED = (1,) * 9 + (4,) + (1,) * 27


def skewing(model) -> list[list[torch.Tensor]]:
    """A of every layer and KV head, from the calibration text."""
    found = []
    for layer in recorded(model, calibration_ids(model)):
        queries = layer.query[0].unflatten(0, (layer.keys.shape[1], -1)).flatten(1, 2)
        found.append([place.skew(head.float()) for head in queries])
    return found


def chosen_columns(row, matrices, ratio, variant="paper", first=None):
    """Those of every KV head, by the prompt's keys and by the queries of this row (or the `first`)."""
    found, count, asking = [], place.column_count(ratio, row.keys.shape[2], variant), first or row
    for head, matrix in enumerate(matrices):
        queries, keys = asking.query[row.group(head), : asking.prompt], row.keys[head, : row.prompt]
        found.append(place.columns(queries @ matrix, keys @ matrix, count, variant))
    return found


def guesses(row, at, held, matrices, columns):
    """Scores `[group, past tokens]` that the query heads of every KV head are guessed to give."""
    found = []
    for head, matrix in enumerate(matrices):
        past = row.keys[head, held[head]]
        asked = row.asked[row.group(head), at]
        found.append(torch.stack([place.guess(q, past, matrix, columns[head], row.scaling) for q in asked]))
    return found


def by_infinigen(matrices, budget, alpha, ratio, variant="paper", everybody=None, first=None):
    """everybody(step's position): scores of all rows' heads, where one count serves all of them; first: the
    row that chooses everybody's columns."""

    def start(row):
        columns = chosen_columns(row, matrices, ratio, variant, first)

        def fetch(new, held):
            (at,) = new
            scores = guesses(row, at, held, matrices, columns)
            cap = min(keep.budget(budget, at + 1), len(held[0])) if budget != 1 else len(held[0])
            heads = [head for group in scores for head in group]
            count = cap
            if alpha != math.inf:
                count = place.how_many(
                    heads if everybody is None else everybody(row, at), alpha, cap, variant
                )
            return [
                [past[i] for i in place.fetched(group, count)]
                for past, group in zip(held, scores, strict=True)
            ]

        return fetch

    return start


def by_quest(budget, page, bound=place.page_bound):
    """Pages of all tokens seen, of which those that hold one still are ranked."""

    def start(row):
        def fetch(new, held):
            (at,), found = new, []
            count = place.page_count(keep.budget(budget, at + 1), page)
            for head, past in enumerate(held):
                here = sorted({token // page for token in [*past, at]})
                keys = [row.keys[head, first * page : min(at + 1, (first + 1) * page)] for first in here]
                pages = place.pages(row.query[row.group(head), at].double(), keys, row.scaling, count, bound)
                chosen = {here[i] for i in pages}
                found.append([token for token in past if token // page in chosen])
            return found

        return fetch

    return start


def everything(row):
    return lambda new, held: held


@pytest.mark.parametrize("link", ["", ",link=1e12"])
@pytest.mark.parametrize("budget", [0.2, 7, 1000])
def test_topk(budget, link):
    run = Driven(f"topk:budget={budget},full_layers=1{link}", passes=MIXED, layers=2).run()
    check(run, keep_all, layer=0)
    check(run, keep_all, by_topk(budget), layer=1)


LINK = ",link=1e12"


@pytest.mark.parametrize(
    "budget, page, head_dim, link",
    [(0.4, 3, 20, LINK), (17, 4, 80, ""), (0.9, 1, 14, LINK), (1000, 5, 20, ""), (0.4, 3, 20, "")],
)
def test_quest(budget, page, head_dim, link):
    spec = f"quest:budget={budget},page={page},full_layers=1{link}"
    run = Driven(spec, (33, 7), MIXED, layers=2, head_dim=head_dim).run()
    check(run, keep_all, layer=0)
    check(run, keep_all, by_quest(budget, page), layer=1)


@pytest.mark.parametrize("group, head_dim", [(3, 20), (1, 14)])
def test_quest_by_centres(group, head_dim):
    """Pages that fill token by token and five at once, of two rows that begin elsewhere."""
    spec = "quest:budget=12,page=4,full_layers=0,digest=centre"
    run = Driven(spec, (33, 7), MIXED, group=group, head_dim=head_dim).run()
    check(run, keep_all, by_quest(12, 4, place.page_estimate))
    other = Driven(
        "quest:budget=12,page=4,full_layers=0", (33, 7), MIXED, group=group, head_dim=head_dim
    ).run()
    assert any(a[0].attended != b[0].attended for a, b in zip(run.seen, other.seen, strict=True))


def test_quest_where_every_head_has_its_own_keys():
    check(Driven("quest:budget=9,page=2,full_layers=0", group=1).run(), keep_all, by_quest(9, 2))


def test_quest_over_what_h2o_keeps():
    """Pages lose tokens, and those without any leave."""
    made = {"keep": H2O(0.4, 0.5), "place": Host(Quest(6, 0, page=2))}
    check(Driven(made, (33, 12)).run(), by_h2o(0.4, 0.5), by_quest(6, 2))


@pytest.mark.parametrize("spec, columns, outlying, group", [
    ("shadowkv:budget=0.3,rank=0.4,chunk=3,outliers=0.3,recent=1", 16, lambda chunks: int(0.3 * chunks), 3),
    ("shadowkv:budget=9,rank=7,chunk=5,outliers=1,recent=2", 7, lambda chunks: min(1, chunks), 3),
    ("shadowkv:budget=0.5,rank=1,chunk=4,outliers=0,recent=0", 40, lambda chunks: 0, 1),
    ("shadowkv:budget=1,rank=0.2,chunk=2", 8, lambda chunks: int(0.05 * chunks + 1e-6), 1),
])  # fmt: skip
def test_shadowkv(spec, columns, outlying, group):
    """What is attended to, with which keys, and the values that cross, at every pass of two rows."""
    run = Driven(spec, (38, 11), MIXED, group=group).run()
    policy = run.cache.layers[0].place.policy
    frequencies = [10000.0 ** (-2 * i / 20) for i in range(10)]
    crossed = [0] * len(run.seen)
    for index, row in enumerate(run.rows()):
        prompt_keys = row.keys[:, : row.prompt]
        low = place.low_rank(prompt_keys, frequencies, columns).float()
        chunks = max(0, row.prompt // policy.chunk - policy.recent)
        parts = [
            place.shadow_parts(mine, policy.chunk, outlying(chunks), policy.recent) for mine in prompt_keys
        ]
        keys = row.keys.clone()
        for head, (offered, _) in enumerate(parts):
            for tokens in offered:
                keys[head, tokens] = low[head, tokens]
        crossed[0] += sum(len(exact) for _, exact in parts) + KV_HEADS * row.prompt
        for step, new in list(run.positions_of(index))[1:]:
            attended = []
            budget = keep.budget(policy.budget, new[-1] + 1)
            for head, (offered, exact) in enumerate(parts):
                chosen = range(len(offered))
                if len(new) == 1 and policy.budget != 1 and offered:
                    means = [row.keys[head, tokens].mean(0) for tokens in offered]
                    count = max(1, budget // policy.chunk)
                    chosen = place.shadow_chunks(
                        row.query[row.group(head), new[0]], means, row.scaling, count
                    )
                fetched = [token for i in chosen for token in offered[i]]
                attended.append(sorted([*fetched, *exact, *range(row.prompt, new[-1] + 1)]))
                crossed[step] += len(fetched) + len(new)
            found, where = run.seen[step][0], f"pass {step}, row {index}"
            assert found.attended[index] == attended, where
            expected = row.out(new, attended, keys)
            assert torch.allclose(found.out[index, :, -len(new) :], expected, atol=1e-5), where
    assert [seen[0].moved for seen in run.seen] == [20 * 4 * count for count in crossed]


@pytest.mark.parametrize("spec, budget, alpha, ratio, head_dim", [
    ("infinigen:budget=9,alpha=0.4,ratio=0.3", 9, 0.4, 0.3, 20),
    ("infinigen:budget=0.6,alpha=1.5,ratio=0.18,link=1e12", 0.6, 1.5, 0.18, 20),
    ("infinigen:budget=0.2,alpha=inf", 0.2, math.inf, 0.3, 80),
    ("infinigen:budget=1,alpha=0.7,ratio=1", 1, 0.7, 1, 32),
])  # fmt: skip
def test_infinigen(spec, budget, alpha, ratio, head_dim):
    run = Driven(spec, (31, 9), MIXED, layers=3, head_dim=head_dim).run()
    matrices = skewing(run.model)
    counts = set()
    for layer in range(2):
        check(run, keep_all, layer=layer)
    check(run, keep_all, by_infinigen(matrices[2], budget, alpha, ratio), layer=2)
    for seen in run.seen[1:]:
        counts |= {len(head) for row in seen[2].attended for head in row}
    assert len(counts) > 3  # neither the cap nor everything
    assert run.norms == {(2, None)}


OFFICIAL = ["official-speed", "official-accuracy", "official-accuracy-llama"]


@pytest.mark.parametrize("variant", OFFICIAL)
def test_infinigen_after_the_official_code(variant):
    alpha, ratio = 0.5, 0.38  # 7 of 20 columns, where the paper's rounding gives 8
    spec = f"infinigen:budget=9,alpha={alpha},ratio={ratio},variant={variant}"
    run = Driven(spec, (31, 9), layers=3).run()
    (matrices,), rows = skewing(run.model)[2:], run.rows(2)
    first = rows[0] if variant == "official-speed" else None
    columns = [chosen_columns(row, matrices, ratio, variant, first) for row in rows]
    counts = set()

    def everybody(row, at):
        step, found = at - row.prompt, []
        for other, mine in zip(rows, columns, strict=True):
            now = other.prompt + step
            scores = guesses(other, now, [list(range(now))] * KV_HEADS, matrices, mine)
            found += [head for group in scores for head in group]
        counts.add(place.how_many(found, alpha, 99, variant))
        return found

    check(run, keep_all, by_infinigen(matrices, 9, alpha, ratio, variant, everybody, first), layer=2)
    assert run.norms == {(2, 1)}  # the norm of the layer before
    assert len(counts - {1}) > 1  # neither the cap nor the least


@pytest.mark.parametrize("policy", ["fifo", "lru", "counter"])
def test_infinigen_with_a_pool(policy):
    spec = f"infinigen:budget=5,alpha=0.6,full_layers=1,pool=0.7,victim={policy}"
    run = Driven(spec, (31, 9), MIXED, layers=2).run()
    matrices = skewing(run.model)
    check(run, by_pool(0.7, policy), layer=0)
    check(run, by_pool(0.7, policy), by_infinigen(matrices[1], 5, 0.6, 0.3), layer=1)


@pytest.mark.parametrize("method", ["topk", "infinigen"])
def test_nothing_is_fetched_that_the_window_hides(method):
    more = ",alpha=inf,full_layers=1" if method == "infinigen" else ",full_layers=1"
    run = Driven(f"{method}:budget=4{more}", (31,), window=9, layers=2).run()
    for step, seen in enumerate(run.seen[1:]):
        at = 31 + step
        assert all(position > at - 9 for head in seen[1].attended[0] for position in head)


@given(head_dim=st.sampled_from([4, 10, 15]), tokens=st.sampled_from([20, 45]), seed=st.integers(0, 9))
def test_skewing_keeps_every_score_and_sorts_the_columns(head_dim, tokens, seed):
    queries, keys = torch.randn(2, tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    a = place.skew(queries)
    assert torch.allclose((queries @ a) @ (keys @ a).T, queries @ keys.T, atol=1e-4)
    size = (queries @ a).norm(dim=0)
    assert (size[:-1] >= size[1:] - 1e-4).all()
