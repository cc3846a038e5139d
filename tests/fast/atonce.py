"""At once: models of many shapes, and what is said with all layers in one call and with none."""

import copy

import torch
from tiny import prompt, tiny

import kvlab
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


def life(made, rows=1, steps=40, tokens=13, left=held, back=2):
    """What a cache says, and what left(cache) finds in it: steps past the room of the first buffer, a fork, a
    crop, a copy, and a reset. made: a method, or model -> cache."""

    def say(fast):
        cache = made(fast) if callable(made) else kvlab.make_cache(fast, made)
        stepper = kvlab.Stepper(fast, cache)
        found, inside = [stepper.feed(prompt(tokens, rows), last=True)], []
        for step in range(steps):
            found.append(stepper.feed(prompt(1, rows, seed=step), last=True))
            inside += left(cache)
        stepper.fork(torch.tensor([rows - 1, 0]))
        found += [stepper.feed(prompt(1, 2, seed=step), last=True) for step in range(3)]
        cache.crop(-back)
        twin = copy.deepcopy(cache)
        with torch.no_grad():
            for seed, each in enumerate((cache, twin, cache, twin)):
                found.append(fast(prompt(1, 2, seed=seed), past_key_values=each).logits)
        inside += [*left(cache), *left(twin)]
        cache.reset()
        stepper = kvlab.Stepper(fast, cache)
        found += [stepper.feed(prompt(5), last=True), stepper.feed(prompt(1), last=True)]
        return [*found, *inside, *left(cache)]

    return say
