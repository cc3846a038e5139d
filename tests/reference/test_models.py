"""Whole models that attend by the definition, one head and one query at a time, beside kvlab's caches."""

import pytest
import torch
from reference.definitions import attention, keep, static_graph, store
from reference.driven import model_of
from tiny import begun, left_padded, prompt, tiny
from transformers import AttentionInterface, AttentionMaskInterface

import kvlab
from kvlab.attention import recorded
from kvlab.models import calibration_ids
from kvlab.static_graph.kv_manager import POLICIES, KVManager

LENGTH = 23  # S of the static graph
SPECS = ["full", "static:length=90", "paged:block=7", "recompute", "offload", "offload:link=1e12", "uvm"]
SETTINGS = {"window": None, "scales": None}


def by_definition(module, query, key, value, attention_mask, *, scaling, **kwargs):
    """The attention function: `[batch, heads, tokens, head_dim]`; no row may be padded."""
    out = torch.empty_like(query).transpose(1, 2)
    if SETTINGS["scales"] is not None:
        key, value = (
            torch.stack([rounded(x, s) for x, s in zip(side.unbind(1), scales, strict=True)], 1)
            for side, scales in zip((key, value), SETTINGS["scales"][module.layer_idx], strict=True)
        )
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            mine = attention.kv_head(head, query.shape[1], key.shape[1])
            one = query[row, head], key[row, mine], value[row, mine]
            out[row, :, head] = attention.causal(*one, scaling, SETTINGS["window"])
    return out, None


def rounded(x, scale):
    return store.integer_codes(x, 8, scale, None) * scale


@pytest.fixture(scope="module")
def naive():
    """Logits of all tokens `[rows, tokens]`, by the definition."""
    AttentionInterface.register("definition", by_definition)
    AttentionMaskInterface.register("definition", lambda attention_mask=None, **_: attention_mask)

    def logits(model, ids, window=None, scales=None):
        SETTINGS.update(window=window, scales=scales)
        model.set_attn_implementation("definition")
        try:
            with torch.no_grad():
                return model(ids, use_cache=False).logits
        finally:
            model.set_attn_implementation("sdpa")

    return logits


@pytest.fixture(scope="module")
def model():
    return model_of(2, 20)


def fed(model, cache, prompts, later):
    """Logits of every token of each row, through a cache."""
    stepper = kvlab.Stepper(model, cache)
    ids, mask = left_padded(prompts)
    found = [stepper.feed(ids, None if bool(mask.all()) else mask)]
    found += [stepper.feed(later[:, i : i + 1]) for i in range(later.shape[1])]
    logits = torch.cat(found, 1)
    return [logits[row, ids.shape[1] - one.shape[1] :] for row, one in enumerate(prompts)]


@pytest.mark.parametrize("spec", SPECS)
def test_what_gives_nothing_up(model, naive, spec):
    prompts, later = [prompt(21), prompt(8, seed=1)], prompt(40, rows=2, seed=2)
    rows = fed(model, kvlab.make_cache(model, spec), prompts, later)
    for row, (one, found) in enumerate(zip(prompts, rows, strict=True)):
        expected = naive(model, torch.cat([one, later[row : row + 1]], 1))[0]
        assert torch.allclose(found, expected, atol=1e-4)


def scales_of(model):
    """Of every layer's K and V: a scale for each KV head, by the calibration text."""
    return [
        [[float(head.abs().max() / 127) for head in side[0]] for side in (layer.keys, layer.values)]
        for layer in recorded(model, calibration_ids(model))
    ]


def test_an_int8_static_graph_rounds_every_row_once(model, naive):
    cache = kvlab.make_cache(model, f"padded:length={LENGTH},numbers=int8,chunk=1")
    ids, later = prompt(8), prompt(40, seed=2)
    (found,) = fed(model, cache, [ids], later)
    expected = naive(model, torch.cat([ids, later], 1), LENGTH, scales_of(model))[0]
    # A last digit of fp32 can turn into a whole step of int8, so a few numbers may differ by more.
    assert (found - expected).abs().median() < 1e-5
    assert (found - naive(model, torch.cat([ids, later], 1), LENGTH)[0]).abs().median() > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [2, 8, 13])
def test_the_rows_that_an_engine_reads(policy, length):
    """After every append, by address: the position in every row of the window."""
    manager = KVManager(1, length, 1, policy=policy)
    rows = static_graph.ring if policy == "ring" else static_graph.window
    for appended in range(41):
        expected = rows(appended, length)
        assert manager.positions().tolist() == expected
        for row, position in enumerate(expected):
            assert position < 0 or manager.past[0, 0, row, 0] == position
        assert [bool(x == 0) for x in manager.mask] == [*(position >= 0 for position in expected), True]
        manager.place()
        manager.commit()
        manager.past[0, 0, rows(appended + 1, length).index(appended), 0] = appended


# KVzip reads a prompt twice: what stays, by the definition.


def again_by_definition(model, ids, budget, chunk, first, over="model"):
    """What one prompt `[1, tokens]` leaves, by layer and head: the model reads prompt and chunk without a
    cache, and the definition looks at what every layer's attention was given."""
    tokens, scores = ids.shape[1], {}
    for start in range(0, tokens, chunk):
        span = range(start, min(start + chunk, tokens))
        read = torch.cat([ids, ids[:, max(0, start - 8) : span.stop]], 1)
        for layer, given in enumerate(recorded(model, read)):
            heads = given.keys.shape[1]
            query = given.query[0, :, tokens:].unflatten(0, (heads, -1)).double()
            for head in range(heads):
                mine = scores.setdefault((layer, head), [0.0] * tokens)
                seen = query[head], given.keys[0, head].double(), list(range(tokens)), span
                for token, score in keep.kvzip_score(*seen, given.scaling, first).items():
                    mine[token] = score
    share = keep.budget(budget, tokens)
    group_of = {"model": lambda at: 0, "layer": lambda at: at[0], "head": lambda at: at}[over]
    held = {}
    for group in {group_of(at) for at in scores}:
        members = [at for at in scores if group_of(at) == group]
        kept = keep.kvzip([scores[at] for at in members], share * len(members), first)
        held.update(zip(members, kept, strict=True))
    return held


def held_by_head(cache, row):
    """{(layer, head): positions held} of a row."""
    return {
        (layer.order, head): [p for p in held if p >= 0]
        for layer in cache.attending
        for head, held in enumerate(layer.positions[row].tolist())
    }


REREAD = {
    "kvzip:budget=0.3": (0.3, 2000, 4, "model"),
    "kvzip:budget=7,chunk=17,sinks=0": (7, 17, 0, "model"),
    "kvzip:budget=0.5,chunk=16,sinks=2,over=layer": (0.5, 16, 2, "layer"),
    "kvzip:budget=6,chunk=40,over=head": (6, 40, 4, "head"),
}


@pytest.mark.parametrize("family, shape", [
    ("llama", {}),
    ("llama", {"num_attention_heads": 6, "hidden_size": 66, "head_dim": 10}),
    ("opt", {}),
    ("qwen3", {"num_hidden_layers": 1}),
])  # fmt: skip
@pytest.mark.parametrize("spec", REREAD)
def test_what_stays_of_a_prompt_that_is_read_again(family, shape, spec):
    """Grouped queries, odd sizes, several chunks, a padded batch; and what is written later stays."""
    model, sizes = tiny(family, **shape), (47, 9, 30)
    prompts = [prompt(size, seed=size) for size in sizes]
    expected = [again_by_definition(model, one, *REREAD[spec]) for one in prompts]
    stepper = begun(model, spec, left_padded(prompts))
    assert [held_by_head(stepper.cache, row) for row in range(3)] == expected
    for step in range(3):
        stepper.feed(prompt(1, rows=3, seed=step))
    for row, size in enumerate(sizes):
        later = [size, size + 1, size + 2]
        assert held_by_head(stepper.cache, row) == {at: [*held, *later] for at, held in expected[row].items()}
