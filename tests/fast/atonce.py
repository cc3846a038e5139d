"""At once: models of many shapes, and what is said with all layers in one call and with none."""

import torch
from tiny import tiny

from kvlab.fast import all_layers

SHAPES = {  # heads, KV heads, width of a head; multiples of 32 alone have a kernel
    "alone": (2, 2, 64), "grouped": (4, 2, 32), "of three": (3, 1, 96), "of eight": (8, 1, 32),
    "wide": (2, 1, 160),
}  # fmt: skip


def of(shape="grouped", family="llama", **changes):
    heads, kv_heads, width = SHAPES[shape]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    return tiny(family, hidden_size=48, **sizes, **changes)


def both(fast, say, monkeypatch):
    """What is said with steps in one call, and with none."""
    found = say(fast)
    with monkeypatch.context() as patch:
        patch.setattr(all_layers.AllLayers, "step", lambda *_: False)
        return found, say(fast)


def held(cache) -> list:
    """All that a cache holds, as bits, and what its layers count."""
    bits = [part.view(torch.uint8) for layer in cache.layers for side in layer.store.parts() for part in side]
    return [*bits, torch.tensor([[layer.seen, layer.slots, layer.moved_bytes] for layer in cache.layers])]
