"""Random model: a tiny one of a configuration's class, on which a cache is compared with the model's own."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from .cache import KVCache
from .errors import kind_and_line
from .models import (
    LISTED,
    blocks_of,
    cache_name,
    masks_are_known,
    prepare,
    refusal,
    refused_layers,
    report_block_inputs,
)
from .models.shrunk import PROMPT, TOLERANCE, once, twin_of

STEPS = 5


@torch.no_grad()
def outputs(model, cache=None, steps: int = STEPS) -> torch.Tensor | None:
    """Logits of a prompt and some steps `[1, tokens, vocabulary]`, through this cache, or the model's own;
    None if it has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 96, (1, PROMPT + steps), generator=generator, device="cpu")
    found, name = [], cache_name(model)
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + steps))]:
        out = model(ids[:, start:end], **{name: cache}, use_cache=True)
        cache = getattr(out, name, None) if cache is None else cache
        if cache is None:
            return None
        found.append(out.logits.float())
    return torch.cat(found, 1)


def differs(config, make=KVCache) -> str | None:
    """Why a cache by `make(model)` is not equal to the model's own on a twin, or None if it is."""
    if why := refused_layers(config):
        return why
    try:
        own = twin_of(config)
        if why := refusal(own):
            return why
        expected = outputs(own)
    except Exception as error:
        return f"it could not be tried: no tiny model of its class runs ({kind_and_line(error)})"
    if expected is None:
        return "it does something of its own with K and V (it returns no cache)"
    try:
        ours = prepare(copy.deepcopy(own))
        cache = make(ours)
    except ValueError as error:
        return str(error)
    try:
        found = outputs(ours, cache)
    except Exception as error:
        return f"it does something of its own with K and V ({kind_and_line(error)})"
    off = float((found - expected).abs().max() / expected.std())
    return None if off < TOLERANCE else f"it does something of its own with K and V (off by {off:.2g})"


@torch.no_grad()
def asks_otherwise(config) -> str | None:
    """Why the query that a layer of a twin is asked for beforehand is not its own, or None if it is (see
    `models/rehearsal.py`)."""
    try:
        model, inputs, found, asked = prepare(twin_of(config)), {}, {}, {}
        report_block_inputs(model)
        cache = KVCache(model)
        cache.speculate = lambda index, rehearsal: asked.update({index: rehearsal})
        for index, block in enumerate(blocks_of(model)):
            note = lambda _, args, given, index=index: inputs.update({index: (*args, given)})
            block.register_forward_pre_hook(note, with_kwargs=True)
        for layer in cache.attending:
            layer.on_read = lambda layer, held, slots, query: found.update({layer.index: query})
        outputs(model, cache, 1)
        for index in asked.keys() & found.keys():
            first, *_, given = inputs[index]
            hidden = given["hidden_states"] if first is given else first
            query = replace(asked[index], hidden=hidden)()
            if not (off := float((query - found[index]).abs().max() / query.std())) <= TOLERANCE:
                return f"the query of layer {index} cannot be told before its turn (off by {off:.2g})"
    except Exception as error:
        return f"the query of a layer cannot be told before its turn ({kind_and_line(error)})"
    return None


def serve(model, holds: bool = True, guesses: bool = False) -> None:
    """Prepare the model for a cache. ValueError, one line that says why, if kvlab's caches cannot serve it;
    none if the method holds nothing. A type that is not listed is tried on a twin, once; guesses: whether the
    method asks for a layer's query before its turn."""
    why, config = refusal(prepare(model)), model.config.get_text_config(decoder=True)
    if why is None and config.model_type not in LISTED:
        why = once(_differences, config, differs)
        if why is None and guesses:
            why = once(_guesses, config, asks_otherwise)
    if why is None and not masks_are_known(model):
        why = "it attends by a mask of its own"
    if why is not None and holds:
        raise ValueError(f"{type(model).__name__}: {why}")


_differences: dict[str, str | None] = {}  # small configuration -> why it is refused, or None
_guesses: dict[str, str | None] = {}  # the same, of a method that guesses
