"""Stepped: what a model says step by step through a cache, for engines to be compared."""

import torch
from tiny import left_padded, prompt

import kvlab


def decoded(model, spec, prompts, count=6):
    """Logits of a prompt's last token and of steps after it, with a fork in between."""
    ids, mask = left_padded(prompts)
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    found = [stepper.feed(ids, mask, last=True)]
    for step in range(count):
        found.append(stepper.feed(prompt(1, len(prompts), seed=step), last=True))
    stepper.fork(torch.tensor([len(prompts) - 1, 0]))
    for step in range(2):
        found.append(stepper.feed(prompt(1, 2, seed=step), last=True))
    return torch.cat(found)
