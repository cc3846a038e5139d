"""ModelShape: one set of names for all families, and bytes that are those really held."""

import pytest
import torch
from tiny import FAMILIES, prompt, tiny

import kvlab
from kvlab.arithmetic import SHAPES, kv_bytes
from kvlab.models import ModelShape


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_told_are_the_bytes_held(family):
    """Also where the head dimension is not hidden / heads, as in this qwen3."""
    model, cache = tiny(family), kvlab.make_cache(tiny(family), "full")
    kvlab.Stepper(model, cache).feed(prompt(13, rows=3))
    told = kv_bytes(ModelShape.of(model), 13, batch=3, bits=8 * model.dtype.itemsize)
    assert cache.stats().device_bytes == told
    keys, _ = cache.layers[0].store.read(torch.device("cpu"))
    assert keys.shape[1::2] == (ModelShape.of(model).kv_heads, ModelShape.of(model).head_dim)


def test_a_head_dimension_that_is_not_told_is_that_of_the_hidden_size():
    assert ModelShape.of(tiny("qwen3")).head_dim == 16 != 32 // 4
    assert SHAPES["Llama-7B"].head_dim == 128
    assert ModelShape(2, 30, 5, 1).head_dim == 6 and ModelShape(2, 30, 5, 1, head_dim=8).head_dim == 8
