"""H2O in whole models against its definition: full attention matrices, one token at a time."""

import pytest
import torch
from tiny import left_padded, prompt, tiny
from transformers import DynamicCache

import kvlab
from kvlab.keep import H2O
from kvlab.reference import keep

STEPS = 10


def by_definition(model, ids, later, budget, recent):
    """Held positions per step, layer and KV head, and logits, for one prompt `[1, tokens]` and the tokens
    that later it: eager transformers attention over everything, masked to what is held."""
    layers, heads, group = 4, 2, 2
    tokens = ids.shape[1]
    cache = DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, output_attentions=True)
    limit = keep.budget(budget, tokens)
    acc = [[{} for _ in range(heads)] for _ in range(layers)]
    for layer, head in ((a, b) for a in range(layers) for b in range(heads)):
        weights = out.attentions[layer][0, head * group : (head + 1) * group].double().mean(0)
        acc[layer][head] = keep.h2o({}, dict(enumerate(weights.sum(0).tolist())), limit, recent)
    kept = [[[list(held) for held in row] for row in acc]]
    for step in range(later.shape[1]):
        position = tokens + step
        masked_attention.held = [[{*held, position} for held in row] for row in acc]
        with torch.no_grad():
            out = model(
                later[:, step : step + 1],
                past_key_values=cache,
                output_attentions=True,
                position_ids=torch.tensor([[position]]),
            )
        for layer, head in ((a, b) for a in range(layers) for b in range(heads)):
            weights = out.attentions[layer][0, head * group : (head + 1) * group, 0].double().mean(0)
            given = {token: weights[token].item() for token in (*acc[layer][head], position)}
            acc[layer][head] = keep.h2o(acc[layer][head], given, limit, recent)
        kept.append([[list(held) for held in row] for row in acc])
    masked_attention.held = None
    return kept, out.logits[:, -1].float()


def masked_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Plain softmax attention, masked to `masked_attention.held` in decode steps."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ key.transpose(2, 3) * scaling).double()
    count, slots = scores.shape[2:]
    scores = scores.masked_fill(~torch.ones(count, slots).tril(slots - count).bool(), -torch.inf)
    if masked_attention.held is not None:
        for head in range(scores.shape[1]):
            lost = [t for t in range(slots) if t not in masked_attention.held[module.layer_idx][head // 2]]
            scores[:, head, :, lost] = -torch.inf
    weights = scores.softmax(-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2), weights


masked_attention.held = None


@pytest.fixture(scope="module")
def naive():
    from transformers import AttentionInterface

    AttentionInterface.register("naive", masked_attention)
    return tiny("llama", "naive")


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("budget, recent", [(0.2, 0.5), (0.4, 0.25), (5, 0.5), (3, 0.0), (8, 1.0), (2, 0.5)])
def test_kept_sets_follow_the_definition_at_every_step(naive, tokens, budget, recent):
    model, ids, later = tiny("llama"), prompt(tokens, seed=tokens), prompt(STEPS, seed=90)
    kept, logits = by_definition(naive, ids, later, budget, recent)
    stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=H2O(budget, recent)))
    ours = stepper.feed(ids)
    for step in range(STEPS + 1):
        for layer in range(4):
            positions = stepper.cache.layers[layer].positions[0]
            for head in range(2):
                held = [p for p in positions[head].tolist() if p >= 0]
                assert held == kept[step][layer][head], (step, layer, head)
        if step < STEPS:
            ours = stepper.feed(later[:, step : step + 1])
    assert torch.allclose(ours[:, -1], logits, atol=1e-4)


def test_each_padded_row_has_its_own_budget():
    model = tiny("llama")
    ids, mask = left_padded([prompt(40), prompt(10, seed=1)])
    cache = kvlab.make_cache(model, "h2o:budget=0.2")
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    for _ in range(3):
        assert (cache.layers[0].positions >= 0).sum(-1).tolist() == [[8, 8], [2, 2]]
        stepper.feed(prompt(1, rows=2))
    assert cache.stats().tokens_held == 8


def test_a_budget_of_one_token_keeps_the_newest():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "h2o:budget=0.01")
    kvlab.decode(model, prompt(30), cache, 5)
    assert cache.layers[0].positions.flatten().tolist() == [33, 33]
