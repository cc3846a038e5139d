"""Concentrated heads: the same logits, and few columns that carry as much of the scores as any could."""

import copy

import pytest
import torch
from tiny import prompt, tiny

from course.recipes.concentrate import change_of_basis, concentrate

ROWS = [prompt(40, seed=seed)[0].tolist() for seed in range(4)]


def test_logits_stay():
    model, other = tiny("opt"), copy.deepcopy(tiny("opt"))
    ids = prompt(30, seed=9)
    with torch.no_grad():
        right = model(ids).logits
        concentrated = concentrate(other, ROWS)(ids).logits
    assert torch.allclose(concentrated, right, atol=1e-4)
    changed = other.model.decoder.layers[1].self_attn.q_proj.weight
    assert not torch.allclose(changed, model.model.decoder.layers[1].self_attn.q_proj.weight, atol=1e-2)


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
