"""What InfiniGen rests on, against transformers' own hidden states and attention weights."""

import math

import pytest
import torch
from families.models import family
from tiny import prompt, tiny

import kvlab
from kvlab.calibrate.skew import skew
from kvlab.measure import studies
from kvlab.place import InfiniGen


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
    for layer in range(2):  # the residual stream: the next input is the sum
        total = passage.inputs[layer] + passage.attended[layer] + passage.fed[layer]
        torch.testing.assert_close(total, passage.inputs[layer + 1])
    assert len(passage.fed) == 2 and passage.guesses[0] is None


def test_similarity_by_hand():
    passage = studies.read(tiny("llama"), prompt(9))
    found = studies.similarity(passage)
    assert {name: len(values) for name, values in found.items()} == {
        "block input": 2, "attention output": 2, "ffn output": 2
    }  # fmt: skip
    for token_mean, now, then in zip(found["attention output"], passage.inputs[1:], passage.attended):
        by_hand = [(a @ b / (a.norm() * b.norm())).item() for a, b in zip(now, then)]
        assert token_mean.item() == pytest.approx(sum(by_hand) / 9, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("alpha, ratio", [(0.3, 0.5), (math.inf, 1.0), (math.inf, 0.25)])
def test_what_a_guess_brings_by_hand(family, alpha, ratio):
    """The alpha rule and the cap with loops over queries and heads."""
    model, layer, last, budget = tiny(family), 2, 6, 0.2
    passage, matrix = studies.read(model, prompt(40)), skew(model)[layer]
    asked, keys = (studies.skewed(x, matrix) for x in (passage.guesses[layer], passage.keys[layer]))
    query = studies.skewed(passage.queries[layer], matrix)
    heads, group = len(query), len(query) // len(keys)
    columns = studies.strongest_columns(query[:, :-last], keys[:, :-last], ratio)
    hits = []
    for t in range(40 - last, 40):
        true = torch.stack([keys[h // group, :t] @ query[h, t] for h in range(heads)]) * passage.scaling
        cheap = [keys[h // group, :t][:, columns[h // group]] @ asked[h, t, columns[h // group]]
                 for h in range(heads)]  # fmt: skip
        cheap = torch.stack(cheap) * passage.scaling
        near = [(one > one.max() - alpha).sum().item() for one in cheap]
        count = max(1, min(int(budget * (t + 1)), math.ceil(sum(near) / heads)))
        for head in range(len(keys)):
            mine = slice(head * group, (head + 1) * group)
            looked, guessed = (
                x[mine].softmax(-1).mean(0) if group > 1 else x[mine][0] for x in (true, cheap)
            )
            hits.append(1 + looked[1:].argmax().item() in guessed.topk(count).indices.tolist())
    found = studies.brings_best(passage, layer, InfiniGen(budget, alpha, ratio), matrix, last)
    assert found == pytest.approx(sum(hits) / len(hits))
    if alpha == math.inf:
        assert 0 < found
    with pytest.raises(ValueError, match="layer=0"):
        studies.brings_best(passage, 0, InfiniGen(), matrix)


def test_a_layer_that_is_the_first_with_its_rotary_embedding_has_no_guess():
    """The cache fetches all of it, too: nothing is known of its query before its turn."""
    model = family("Gemma 3")
    kinds = model.config.layer_types
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    passage = studies.read(kvlab.prepare(model), prompt(40))
    assert [i for i, guess in enumerate(passage.guesses) if guess is None] == sorted(first) and len(
        first
    ) == 2
    cache, fetched = kvlab.make_cache(model, "infinigen:budget=2,full_layers=0"), {}
    for layer in cache.attending:
        layer.on_read = lambda layer, held, slots, query: fetched.update({layer.order: slots})
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(40))
    stepper.feed(prompt(1))
    assert [i for i, slots in fetched.items() if slots is None] == sorted(first)
