"""Every keep against its definition (keeps.py): what is held after the prompt and each step, and outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.definitions import attention, keep
from reference.driven import STEPS, Driven, check, keep_all
from reference.keeps import (
    KEEPS,
    by_adakv,
    by_h2o,
    by_keydiff,
    by_lagkv,
    by_pool,
    by_rkv,
    by_sinks,
    by_snapkv,
    by_topk,
    by_tova,
    h2o_score,
    keydiff_score,
    snapkv_score,
)

from kvlab import merging
from kvlab.keep import H2O, TOVA, Pool, PyramidKV, Sinks, SnapKV, rkv
from kvlab.place import Host, TopK

MIXED = (1,) * 17 + (5,) + (1,) * 9 + (2,) + (1,) * 7  # passes of several tokens among the steps


ADAPTIVE = {
    "adakv:of=keydiff,budget=0.3": by_adakv(0.3, *keydiff_score()),
    "adakv:of=keydiff,budget=9,safeguard=0": by_adakv(9, *keydiff_score(), safeguard=0),
    "adakv:of=keydiff,budget=0.3,safeguard=1": by_keydiff(0.3),
    "adakv:budget=20": by_adakv(20, *snapkv_score(16, 5)),
    "adakv:budget=7": by_snapkv(7, 16, 5),  # less than the window: the same for all heads
    "adakv:of=h2o,budget=9": by_adakv(9, *h2o_score(9, 0.5)),  # more than one of the prompts
    "adakv:of=h2o,budget=0.4,safeguard=0.5": by_adakv(0.4, *h2o_score(0.4, 0.5), safeguard=0.5),
}


@pytest.mark.parametrize("passes", [(1,) * STEPS, MIXED], ids=["steps", "mixed"])
@pytest.mark.parametrize("spec", ADAPTIVE)
def test_heads_of_different_lengths(spec, passes):
    check(Driven(spec, passes=passes, head_dim=20).run(), ADAPTIVE[spec])


def test_heads_of_different_lengths_under_a_window():
    """What leaves a window leaves every head that holds it."""
    run = Driven("adakv:of=keydiff,budget=5", (33, 12), window=9, passes=MIXED).run()
    check(run, by_adakv(5, *keydiff_score()))


@pytest.mark.parametrize("passes", [(1,) * STEPS, MIXED], ids=["steps", "mixed"])
@pytest.mark.parametrize("spec", KEEPS)
def test_kept_sets_and_outputs(spec, passes):
    check(Driven(spec, passes=passes, head_dim=20).run(), KEEPS[spec])


@pytest.mark.parametrize("layers", [1, 3])
def test_pyramidkv(layers):
    run = Driven("pyramidkv:budget=0.4,window=3,kernel=3,beta=5", (37, 12), layers=layers).run()
    for layer in range(layers):
        limit = lambda mean, tokens, layer=layer: keep.pyramid(mean, layer, layers, 3, tokens, 5)
        check(run, by_snapkv(0.4, 3, 3, limit), layer=layer)
    held = [len(run.seen[0][layer].kept[0][0]) for layer in range(layers)]
    assert held == ([14] if layers == 1 else [25, 14, 3])  # 14 on the mean


@pytest.mark.parametrize("policy", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("capacity, fetches", [(0.7, 5), (13, 0.2), (5, 3)])
def test_pool(policy, capacity, fetches):
    run = Driven({"keep": Pool(capacity, policy), "place": Host(TopK(fetches))}, passes=MIXED).run()
    check(run, by_pool(capacity, policy), by_topk(fetches))


@pytest.mark.parametrize("made, by", [
    pytest.param(H2O(11, 0.3), by_h2o(11, 0.3), id="h2o"),
    pytest.param(TOVA(9), by_tova(9), id="tova"),
    pytest.param(Sinks(9, 3), by_sinks(9, 3), id="sinks"),
    pytest.param(SnapKV(9, 4, 5), by_snapkv(9, 4, 5), id="snapkv"),
    pytest.param(PyramidKV(9, 4, 5), by_snapkv(9, 4, 5), id="pyramidkv"),
])  # fmt: skip
def test_a_keep_among_fetched_tokens(made, by):
    """What was not fetched was given nothing."""
    check(Driven({"keep": made, "place": Host(TopK(4))}).run(), by, by_topk(4))


WINDOWED = {
    "full": keep_all,
    "h2o:budget=6,recent=0.3": by_h2o(6, 0.3),
    "tova:budget=5": by_tova(5),
    "snapkv:budget=6,window=4": by_snapkv(6, 4, 5),
    "sinks:budget=5": by_sinks(5, 4),
    "lagkv:budget=7,lag=2,sinks=1": by_lagkv(7, 2, 1),
}


@pytest.mark.parametrize("spec", WINDOWED)
def test_in_a_model_with_a_sliding_window(spec):
    """Tokens that no later query sees go by themselves; the keep chooses among the others."""
    check(Driven(spec, (33, 12), window=9, passes=MIXED).run(), WINDOWED[spec])


TIED = {
    "h2o:budget=7,recent=0.3": by_h2o(7, 0.3),
    "snapkv:budget=9,window=3": by_snapkv(9, 3, 5),
    "tova:budget=7": by_tova(7),
}


@pytest.mark.parametrize("spec", TIED)
def test_ties_go_to_the_older_token(spec):
    """Keys of zeros: every query gives all tokens that it sees the same."""
    for made in (Driven(spec), Driven(spec, head_dim=32, noted=False)):
        for keys in made.keys:
            keys.zero_()
        check(made.run(), TIED[spec])


@given(tokens=st.integers(1, 40), head_dim=st.sampled_from([1, 3, 20]), window=st.integers(1, 50) | st.none())
def test_causal_attention_is_torchs(tokens, head_dim, window):
    query, keys, values = torch.randn(3, tokens, head_dim, generator=torch.Generator().manual_seed(tokens))
    at = torch.arange(tokens)
    mask = (at[:, None] >= at) & (at[:, None] - at < (window or tokens))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=0.5)
    assert torch.allclose(attention.causal(query, keys, values, 0.5, window), expected, atol=1e-5)
    total = attention.received(query[None], keys, 0.5, window=window)
    scores = (query @ keys.T * 0.5).masked_fill(~mask, -torch.inf)
    assert torch.allclose(total, scores.softmax(-1).sum(0), atol=1e-5)


@pytest.mark.parametrize("head_dim, group", [(20, 3), (14, 1)])
@pytest.mark.parametrize(
    "parameters", [(0.4, 4, 3, 5), (9, 1, 4, 3, 0.5), (6, 7, 8, 1, 0.0), (12, 9, 2, 7, 1.0)]
)
def test_rkv(parameters, head_dim, group, monkeypatch):
    """A budget below the window as well, keys that are alike, and blocks of 7 keys."""
    monkeypatch.setattr(rkv, "QUERY_BLOCK", 7)
    budget, every, window, kernel, *share = parameters
    spec = f"rkv:budget={budget},every={every},window={window},kernel={kernel},share={(*share, 0.07)[0]}"
    run = Driven(spec, (33, 11), MIXED, head_dim=head_dim, group=group)
    run.keys[0][:, :, 1::3] += 2 * run.keys[0][:, :, :1]  # a third of all point the same way
    check(run.run(), by_rkv(*parameters))


@pytest.mark.parametrize("head_dim, group", [(20, 3), (14, 1)])
@pytest.mark.parametrize("method, follow", [
    ("d2o:budget=0.4", by_h2o(0.4, 0.5)), ("d2o:budget=7,recent=0.3", by_h2o(7, 0.3)),
    ("keydiff:budget=0.4,merge=true", by_keydiff(0.4)),
])  # fmt: skip
def test_what_stays_has_taken_up_what_went(method, follow, head_dim, group, monkeypatch):
    """Sets, outputs, merged keys and values and the threshold after every pass, for two rows of 33 and 9."""
    monkeypatch.setattr(merging, "BLOCK", 5)
    held_now = []

    def after(step, layer):
        held_now.append((layer.positions, layer.keys, layer.values, layer.keep.threshold))

    run = Driven(method, (33, 9), (1,) * 6 + (4,) + (1,) * 9, head_dim=head_dim, group=group).run(after)
    merged = 0
    for index, row in enumerate(run.rows()):
        choose, held = follow(row), [[] for _ in row.keys]
        thresholds = [None] * len(held)
        for step, new in run.positions_of(index):
            attended = [[*mine, *new] for mine in held]
            expected, found = row.out(new, attended), run.seen[step][0]
            assert torch.allclose(found.out[index, :, -len(new) :], expected, atol=1e-5), step
            held = choose(new, attended, attended)
            assert found.kept[index] == held
            positions, keys, values, threshold = held_now[step]
            for head, mine in enumerate(held):
                there = {
                    t: (row.keys[head, t].double(), row.values[head, t].double()) for t in attended[head]
                }
                parts = ({t: pair[part] for t, pair in there.items()} for part in (0, 1))
                *pair, thresholds[head] = keep.merge(*parts, mine, thresholds[head])
                merged += sum(not torch.equal(pair[0][token], there[token][0]) for token in mine)
                for token in mine:
                    row.keys[head, token], row.values[head, token] = pair[0][token], pair[1][token]
                    slot = positions[index, head].tolist().index(token)
                    assert torch.allclose(keys[index, head, slot], row.keys[head, token], atol=1e-5)
                    assert torch.allclose(values[index, head, slot], row.values[head, token], atol=1e-5)
                if thresholds[head] is not None:
                    assert float(threshold[index, head]) == pytest.approx(thresholds[head], abs=1e-5)
    assert merged > 5
