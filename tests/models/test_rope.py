"""Rotations found by asking a model: what they undo is what the projection gave."""

import copy

import pytest
import torch
from tiny import COMMON, FAMILIES, begun, left_padded, prompt, tiny

import kvlab
from kvlab.models import rotations_of

PROJECTED = ["llama", "mistral", "qwen2", "phi"]  # their keys are what k_proj gives, rotated


@pytest.mark.parametrize("name", PROJECTED)
def test_undone_keys_are_what_the_projection_gave(name):
    """Of a padded batch, in every layer, by the positions that the cache holds."""
    model, given = kvlab.prepare(copy.deepcopy(tiny(name))), {}
    for index, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(
            lambda module, args, out, index=index: given.update({index: given.get(index, out)})
        )
    cache = begun(model, "full", left_padded([prompt(90), prompt(41, seed=1)])).cache
    for rotation, layer in zip(rotations_of(model), cache.layers, strict=True):
        keys, _ = layer.store.read(torch.device("cpu"))
        projected = given[layer.index].unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
        there = layer.positions >= 0
        assert (rotation.undo(keys, layer.positions) - projected)[there].abs().max() < 1e-5
        assert (keys - projected)[there].abs().max() > 0.1
        moved = rotation.move(keys, layer.positions, layer.positions + 17)
        again = rotation.undo(moved, layer.positions + 17)
        assert (again - projected)[there].abs().max() < 2e-5


def test_frequencies_that_change_with_the_length_are_refused():
    make, config, own = FAMILIES["llama"]
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    changes = {"rope_parameters": scaled, "max_position_embeddings": 40}
    model = kvlab.prepare(make(config(**COMMON | own | changes)).eval())
    with pytest.raises(ValueError, match="in a way that cannot be undone exactly"):
        rotations_of(model)
