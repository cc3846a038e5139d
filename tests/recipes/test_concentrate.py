"""Concentrated heads: the same logits, and few columns that carry as much of the scores as any could."""

import copy

import pytest
import torch
from tiny import prompt, tiny

from course.recipes.concentrate import change_of_basis, concentrate, documents

ROWS = [prompt(40, seed=seed)[0].tolist() for seed in range(4)]


def projected(model, name):
    """What `name` makes of the rows in the second block, `[tokens, heads, head_dim]`."""
    made = []
    module = getattr(model.model.decoder.layers[1].self_attn, name)
    hook = module.register_forward_hook(lambda _module, _input, out: made.append(out[0].detach()))
    with torch.no_grad():
        for ids in ROWS:
            model(torch.tensor([ids]), use_cache=False)
    hook.remove()
    return torch.cat(made).unflatten(1, (model.config.num_attention_heads, -1))


def test_logits_stay():
    model, other = tiny("opt"), copy.deepcopy(tiny("opt"))
    ids = prompt(30, seed=9)
    with torch.no_grad():
        right = model(ids).logits
        concentrated = concentrate(other, ROWS)(ids).logits
    assert torch.allclose(concentrated, right, atol=1e-4)
    changed = other.model.decoder.layers[1].self_attn.q_proj.weight
    assert not torch.allclose(changed, model.model.decoder.layers[1].self_attn.q_proj.weight, atol=1e-2)


def test_columns_are_centred_orthogonal_and_share_their_size():
    model = concentrate(copy.deepcopy(tiny("opt")), ROWS)
    queries, keys = projected(model, "q_proj").double(), projected(model, "k_proj").double()
    assert keys.mean(0).abs().max() < 1e-5
    for head in range(queries.shape[1]):
        of_queries = queries[:, head].T @ queries[:, head]
        of_keys = keys[:, head].T @ keys[:, head]
        size = of_keys.diagonal()
        assert torch.allclose(of_queries, of_keys, atol=1e-3 * size.max())
        assert torch.allclose(of_keys, size.diag(), atol=1e-3 * size.max())
        assert (size.diff() <= 1e-6 * size.max()).all()


@pytest.mark.parametrize("tokens", [9, 50])
def test_no_other_columns_carry_more_of_the_scores(tokens):
    """The error of r columns is that of the best matrix of rank r (Eckart and Young 1936)."""
    torch.manual_seed(tokens)
    queries, keys = torch.randn(2, tokens, 8, dtype=torch.float64) @ torch.randn(8, 8, dtype=torch.float64)
    keys = keys - keys.mean(0)
    of_queries, of_keys = change_of_basis(queries, keys)
    assert torch.allclose(of_queries @ of_keys.T, torch.eye(8, dtype=torch.float64), atol=1e-8)
    scores = queries @ keys.T
    best = torch.linalg.svdvals(scores)
    for count in range(1, 8):
        few = (queries @ of_queries)[:, :count] @ (keys @ of_keys)[:, :count].T
        assert (scores - few).norm() == pytest.approx(best[count:].norm().item(), rel=1e-3)


def test_other_families_are_refused():
    with pytest.raises(ValueError, match="'llama' has heads that cannot be concentrated, only opt has"):
        concentrate(tiny("llama"), ROWS)


def test_documents_are_the_same_each_time():
    assert documents() == documents()
    assert len(set(documents())) == len(documents())
