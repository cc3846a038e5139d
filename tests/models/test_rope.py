"""Rotations found by asking a model: what they undo is what the projection gave."""

import pytest
import torch
from families.models import FAMILIES as ALL
from families.models import family
from tiny import COMMON, FAMILIES, left_padded, prompt, tiny

import kvlab
from kvlab.models import rotations_of

PROJECTED = ["llama", "mistral", "qwen2", "phi"]  # their keys are what k_proj gives, rotated


@pytest.mark.parametrize("name", PROJECTED)
def test_undone_keys_are_what_the_projection_gave(name):
    """Of a padded batch, in every layer, by the positions that the cache holds."""
    model, given = tiny(name), {}
    cache = kvlab.make_cache(model, "full")
    ids, mask = left_padded([prompt(90), prompt(41, seed=1)])
    hooks = []
    for index, block in enumerate(model.model.layers):

        def note(module, args, out, index=index):
            given.setdefault(index, out)

        hooks.append(block.self_attn.k_proj.register_forward_hook(note))
    try:
        kvlab.Stepper(model, cache).feed(ids, mask)
    finally:
        for hook in hooks:
            hook.remove()
    for rotation, layer in zip(rotations_of(model), cache.layers, strict=True):
        keys, _ = layer.store.read(torch.device("cpu"))
        projected = given[layer.index].unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
        there = layer.positions >= 0
        assert (rotation.undo(keys, layer.positions) - projected)[there].abs().max() < 1e-5
        assert (keys - projected)[there].abs().max() > 0.1
        moved = rotation.move(keys, layer.positions, layer.positions + 17)
        again = rotation.undo(moved, layer.positions + 17)
        assert (again - projected)[there].abs().max() < 2e-5


def test_which_families_rotate_and_how():
    found, refused = {}, {}
    for name in ALL:
        model = kvlab.prepare(family(name))
        try:
            found[name] = rotations_of(model)
        except ValueError as error:
            refused[name] = str(error)
    assert {name for name, why in refused.items() if "has no rotary embedding (RoPE)" in why} == {
        "OPT", "GPT-2", "Granite 4", "Jamba",
    }  # fmt: skip
    assert {name for name, why in refused.items() if "latents" in why} == {"DeepSeek-V2", "DeepSeek-V3"}
    assert len(refused) == 6
    neighbours = {name for name, layers in found.items() if any(one and one.neighbours for one in layers)}
    assert neighbours == {"GLM-4", "Cohere 2", "Llama 4", "Llama 4, chunk 64"}
    assert {name for name, layers in found.items() if None in layers} == {
        "SmolLM3", "Cohere 2", "Llama 4", "Llama 4, chunk 64",
    }  # fmt: skip
    partial = {name for name in found if 2 * found[name][0].frequencies.numel() < 8}
    assert {"Phi", "GLM-4", "StableLM", "GPT-NeoX", "Qwen3-Next"} == partial


def test_frequencies_that_change_with_the_length_are_refused():
    make, config, own = FAMILIES["llama"]
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    changes = {"rope_parameters": scaled, "max_position_embeddings": 40}
    model = kvlab.prepare(make(config(**COMMON | own | changes)).eval())
    with pytest.raises(ValueError, match="in a way that cannot be undone exactly"):
        rotations_of(model)
