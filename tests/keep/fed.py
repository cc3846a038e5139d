"""Fed: a keep that is driven step by step, alone and in a padded batch, for keeps with ragged heads."""

import torch
from tiny import prompt

import kvlab


def fed(model, policy, ids, mask=None, steps=6, store=None):
    """(cache, logits after the prompt and every step)."""
    cache = kvlab.KVCache(model, keep=policy, store=store)
    stepper = kvlab.Stepper(model, cache)
    found = [stepper.feed(ids, mask, last=True)]
    found += [stepper.feed(prompt(1, rows=len(ids), seed=step), last=True) for step in range(steps)]
    return cache, torch.stack(found, 1)
