"""A row of a padded batch that begins in a later piece of the prompt decides its own scales, then."""

import pytest
import torch
from tiny import tiny

import kvlab


@pytest.mark.parametrize("spec", ["int8:axis=channel", "int8:axis=tensor", "fp8:axis=channel"])
def test_a_row_that_begins_late_has_scales_of_its_own(spec):
    model = tiny("llama")
    ids = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    batch = kvlab.make_cache(model, spec)
    stepper = kvlab.Stepper(model, batch)
    with batch.prefill():
        stepper.feed(ids[:, :8], mask[:, :8])  # nothing of row 0 yet
        stepper.feed(ids[:, 8:16], mask[:, 8:16])
    alone = kvlab.make_cache(model, spec)
    kvlab.Stepper(model, alone).feed(ids[:1, 10:16])
    for one, other in zip(batch.layers, alone.layers, strict=True):
        assert one.store.begun == [True, True] and other.store.begun == [True]
        for mine, its in zip(one.store.fixed_keys, other.store.fixed_keys, strict=True):
            assert its.abs().max() > 0
            # the first layer's keys come from no cache; later ones saw their row's tokens as they are stored
            nearly = 1e-3 if one.index == 0 else 0.25
            assert torch.allclose(mine[:1].float(), its.float(), rtol=nearly)
    moved = batch.layers[0].store.fixed_keys[0].clone()
    stepper.feed(ids[:, 16:17])
    assert torch.equal(batch.layers[0].store.fixed_keys[0], moved)  # decided once
    batch.reorder_cache(torch.tensor([1, 0, 0]))
    assert batch.layers[0].store.begun == [True, True, True]
