"""Fed: a keep that is driven step by step, alone and in a padded batch, for keeps with ragged heads."""

import torch
from tiny import left_padded, prompt

import kvlab


def fed(model, policy, ids, mask=None, steps=6, store=None):
    """(cache, logits after the prompt and every step)."""
    cache = kvlab.KVCache(model, keep=policy, store=store)
    stepper = kvlab.Stepper(model, cache)
    found = [stepper.feed(ids, mask, last=True)]
    found += [stepper.feed(prompt(1, rows=len(ids), seed=step), last=True) for step in range(steps)]
    return cache, torch.stack(found, 1)


def check_padding(model, policy) -> None:
    """A padded batch holds and says what each prompt does alone, head by head."""
    prompts = [prompt(size, seed=size) for size in (30, 4, 17)]
    cache, found = fed(model, policy, *left_padded(prompts))
    for row, one in enumerate(prompts):
        stepper = kvlab.Stepper(model, kvlab.KVCache(model, keep=policy))
        mine = [stepper.feed(one, last=True)]
        mine += [stepper.feed(prompt(1, rows=3, seed=s)[row : row + 1], last=True) for s in range(6)]
        assert torch.allclose(found[row], torch.cat(mine), atol=1e-6)
        for layer, other in zip(cache.layers, stepper.cache.layers, strict=True):
            for head in range(layer.kv_heads):
                own, alone = layer.positions[row, head], other.positions[0, head]
                assert own[own >= 0].tolist() == alone[alone >= 0].tolist()
