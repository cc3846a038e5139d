"""What InfiniGen rests on, against transformers' own hidden states and attention weights."""

import pytest
import torch
from tiny import prompt, tiny

from kvlab.measure import studies


def spread(x, heads):
    return x.repeat_interleave(heads // x.shape[0], dim=0)


@pytest.mark.parametrize("family", ["phi", "qwen3", "opt"])
def test_a_passage_is_what_transformers_reports(family):
    ids = prompt(23)
    passage = studies.read(tiny(family), ids)
    with torch.no_grad():
        out = tiny(family, "eager")(ids, output_hidden_states=True, output_attentions=True)
    for layer, weights in enumerate(out.attentions):
        torch.testing.assert_close(passage.inputs[layer], out.hidden_states[layer][0], atol=1e-4, rtol=1e-4)
        query, keys = passage.queries[layer], passage.keys[layer]
        asked = studies.scores(query, keys, passage.scaling)
        asked = asked.masked_fill(torch.ones(23, 23).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(asked, weights[0], atol=1e-4, rtol=1e-3)
    for layer in range(3):  # the residual stream: the next input is the sum
        total = passage.inputs[layer] + passage.attended[layer] + passage.fed[layer]
        torch.testing.assert_close(total, passage.inputs[layer + 1])
    assert len(passage.fed) == 3 and passage.guesses[0] is None


def test_similarity_by_hand():
    passage = studies.read(tiny("llama"), prompt(9))
    found = studies.similarity(passage)
    assert {name: len(values) for name, values in found.items()} == {
        "block input": 3, "attention output": 3, "ffn output": 3
    }  # fmt: skip
    for token_mean, now, then in zip(found["attention output"], passage.inputs[1:], passage.attended):
        by_hand = [(a @ b / (a.norm() * b.norm())).item() for a, b in zip(now, then)]
        assert token_mean.item() == pytest.approx(sum(by_hand) / 9, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_found_by_hand(family):
    """Loops over queries and heads, in place of masks and gathers."""
    passage, layer, last = studies.read(tiny(family), prompt(40)), 2, 5
    query, guess, keys = passage.queries[layer], passage.guesses[layer], passage.keys[layer]
    kv_heads, group, count = keys.shape[0], query.shape[0] // keys.shape[0], 7
    recalls, weights = [], []
    for head in range(kv_heads):
        mine = range(head * group, (head + 1) * group)
        size = sum(query[h, :-last].abs() for h in mine).sum(0) / group + keys[head, :-last].abs().sum(0)
        columns = size.topk(round(0.5 * keys.shape[2])).indices
        for t in range(40 - last, 40):
            true = torch.stack([keys[head, :t] @ query[h, t] for h in mine]) * passage.scaling
            cheap = torch.stack([keys[head, :t, columns] @ guess[h, t, columns] for h in mine])
            cheap = cheap * passage.scaling
            if group > 1:
                best, chosen = (x.softmax(-1).mean(0).topk(count).indices.tolist() for x in (true, cheap))
            else:
                best, chosen = (x[0].topk(count).indices.tolist() for x in (true, cheap))
            recalls.append(len(set(best) & set(chosen)) / count)
            weights.append(true.softmax(-1).mean(0)[chosen].sum().item())
    by_hand = sum(recalls) / len(recalls), sum(weights) / len(weights)
    assert studies.found(passage, layer, 7 / 35, ratio=0.5, last=last) == pytest.approx(by_hand, abs=1e-5)
