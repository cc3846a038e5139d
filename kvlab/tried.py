"""Tried: every method on a twin of a model, at the setting at which it gives nothing up."""

from __future__ import annotations

from .make import make_cache
from .models import prepare, refusal, refused_layers
from .models.shrunk import twin_of
from .twin import differs

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


def row(config) -> dict[str, str]:
    """{method: "equal", or why not} of a twin of this configuration.

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
