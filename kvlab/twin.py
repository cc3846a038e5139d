"""Twin: a tiny random model of the same configuration class, on which every method is tried against the
model's own attention and cache."""

from __future__ import annotations

import contextlib
import copy
import weakref

import torch

from .attention import stopping, told
from .cache import KVCache
from .errors import kind_and_line
from .models import listed, prepare, refusal, refused_layers, restore
from .models.shrunk import once, twin_of

PROMPT, STEPS = 20, 5
TOLERANCE = 1e-3  # of the logits' standard deviation; a wrong token or mask is off by far more


@torch.no_grad()
def outputs(model, cache=None, steps: int = STEPS) -> torch.Tensor | None:
    """Logits of a prompt and some steps `[1, tokens, vocabulary]`, through this cache, or the model's own;
    None where it has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 96, (1, PROMPT + steps), generator=generator)
    found = []
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + steps))]:
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = getattr(out, "past_key_values", None) if cache is None else cache
        if cache is None:
            return None
        found.append(out.logits.float())
    return torch.cat(found, 1)


def differs(config, make=KVCache) -> str | None:
    """Why a cache by `make(model)` is not equal to the model's own on a twin, or None where it is."""
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


SPECS = {  # method -> the setting at which it gives nothing up
    "full": "full",
    "recompute": "recompute",
    "static": "static:length=80",
    "paged": "paged:block=7",
    "int8": "int8:sinks=80",
    "int4": "int4:sinks=80",
    "int2": "int2:sinks=80",
    "kivi2": "kivi2:recent=80",
    "kivi4": "kivi4:recent=80",
    "sinks": "sinks:budget=1",
    "h2o": "h2o:budget=1",
    "d2o": "d2o:budget=1",
    "snapkv": "snapkv:budget=1",
    "tova": "tova:budget=1",
    "pyramidkv": "pyramidkv:budget=1",
    "adakv": "adakv:budget=1",
    "kvzip": "kvzip:budget=1000",
    "keydiff": "keydiff:budget=1",
    "keynorm": "keynorm:budget=1",
    "lagkv": "lagkv:budget=1",
    "expected": "expected:budget=1",
    "rkv": "rkv:budget=1",
    "random": "random:budget=1",
    "offload": "offload",
    "offload+h2o": "offload+h2o:budget=1",
    "uvm": "uvm",
    "uvm+h2o": "uvm+h2o:budget=1,memory=1",
    "topk": "topk:budget=1",
    "infinigen": "infinigen:budget=1,alpha=inf,ratio=1,full_layers=1",
    "quest": "quest:budget=80,page=4,full_layers=1",
    "shadowkv": "shadowkv:budget=1,rank=1",
}


FORMATS = {  # of what rounds and holds some tokens or sides exact, the same
    "int5": "int5:sinks=80",
    "kvquant": "kvquant:sinks=80",
    "mixed": "mixed:k=full,v=full",
}


def row(config, make_cache) -> dict[str, str]:
    """{method: "equal", or why not}, each made by `make_cache(model, spec)` for a twin of this configuration.

    ValueError, one line, for a model that no method can serve.
    """
    if why := refused_layers(config):
        raise ValueError(why)
    twin = prepare(twin_of(config))
    if why := refusal(twin) or differs(config):
        raise ValueError(f"{type(twin).__name__}: {why}")
    found = {}
    for name, spec in (SPECS | FORMATS).items():
        if name != "recompute":
            found[name] = differs(config, lambda model, spec=spec: make_cache(model, spec)) or "equal"
    return found


def serve(model, holds: bool = True) -> None:
    """Let the model attend through kvlab. ValueError, one line that says why, where kvlab's caches cannot
    serve it; it then attends as before, and so it does, without an error, where the method holds nothing. A
    type that is not listed is tried on a twin, once."""
    why = refusal(prepare(model))
    if why is None and not listed(model):
        why = once(_differences, model.config.get_text_config(decoder=True), differs)
    if why is None and not _masks_are_known(model):
        why = "it attends by a mask of its own"
    if why is not None:
        restore(model)
        if holds:
            raise ValueError(f"{type(model).__name__}: {why}")


_differences: dict[str, str | None] = {}  # small configuration -> why it is refused, or None
_known: weakref.WeakSet = weakref.WeakSet()  # models whose masks are known


def _masks_are_known(model) -> bool:
    """Whether the model's mask functions, asked in a pass that ends at the first attention, are known."""
    if model not in _known:
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        with torch.no_grad(), told() as visibilities, stopping(), contextlib.suppress(Exception):
            model(ids, use_cache=False)
        if not all(visibility.known for visibility in visibilities):
            return False
        _known.add(model)
    return True
