"""Stepped: what a model says step by step through a cache, for engines to be compared."""

import numpy as np
import torch
from tiny import left_padded, prompt

import kvlab


def arrays(body) -> list[np.ndarray]:
    """The arrays of a compiled body, in which a linear layer is a tuple."""
    parts, found = [body.into, body.out_of, body.last], []
    while parts:
        one = parts.pop()
        parts += one if isinstance(one, tuple | list) else []
        found += [one] if isinstance(one, np.ndarray) and one.size else []
    return found


def read_in_place(model) -> bool:
    """Whether what the compiled body of a model reads is its weights, where they are."""
    held = [weight.detach().numpy() for weight in model.parameters()]
    return all(any(np.shares_memory(one, weight) for weight in held) for one in arrays(model.forward.body))


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
