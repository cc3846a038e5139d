"""Caches of every kind: each method once, and keeps, stores and places put together in other ways."""

import torch
from families.profiles import SETTINGS, profiled
from tiny import EACH, prompt, tiny

import kvlab
from kvlab.keep import H2O, AdaKV, KeyDiff, Sinks
from kvlab.place import Host, InfiniGen, ModelledLink, TopK
from kvlab.store import Float8, Growing, Int, Kivi, Paged, Ragged, Smoothed, Static

CACHED = [spec for spec in kvlab.FIRST_WAVE if spec != "recompute"]
COMPOSED = {
    "h2o in int2 with zero points": lambda: {"keep": H2O(0.4), "store": Int(2, 4, symmetric=False)},
    "sinks in static int4 per channel": lambda: {
        "keep": Sinks(0.4),
        "store": Static(40, Int(4, axis="channel")),
    },
    "fp8 with a scale, paged": lambda: {"store": Paged(format=Float8(axis="tensor"))},
    "int4 per channel on the host, topk": lambda: {
        "store": Growing(Int(4, axis="channel", symmetric=False)),
        "place": Host(TopK(0.5), ModelledLink(1e9)),
    },
    "kivi2": lambda: {"store": Kivi(2, group=4, recent=6)},
    "h2o in smoothed int4 with exact sinks": lambda: {
        "keep": H2O(0.4),
        "store": Static(40, Smoothed(Int(4)), Int(4), sinks=3),
    },
    "h2o in int4": lambda: {"keep": H2O(0.4), "store": Int(4, group=4)},
    "h2o in a static buffer": lambda: {"keep": H2O(0.4), "store": Static(40)},
    "sinks in static int8": lambda: {"keep": Sinks(0.4), "store": Static(40, Int(8))},
    "fp8 on the host": lambda: {"store": Growing(Float8("e5m2")), "place": Host()},
    "int4 on the host, topk": lambda: {"store": Int(4), "place": Host(TopK(0.5))},
    "adakv in int4": lambda: {"keep": AdaKV(KeyDiff(0.4)), "store": Ragged(Int(4))},
    "h2o that merges in a static buffer": lambda: {"keep": H2O(0.4, merge=True), "store": Static(40)},
    "infinigen over h2o": lambda: {"keep": H2O(0.6), "place": Host(InfiniGen(0.5, full_layers=1))},
}
LINKED = [
    "infinigen:budget=0.5,pool=12,link=1e9",
    "offload:link=1e9",
    "offload+int4:link=1e9",
    "offload+h2o:budget=0.4,link=1e9",
    "uvm:link=1e9",
    "uvm+h2o:budget=0.4,link=1e9",
    "topk:budget=0.5,link=1e9",
    "infinigen:budget=0.5,link=1e9",
]
PROFILED = [lossy[0] for _, lossy in SETTINGS.values()]
NAMED = dict.fromkeys([*CACHED, *EACH, *PROFILED, *COMPOSED, *LINKED])
EVERY = [spec for spec in NAMED if spec != "recompute"]


def make(model, spec):
    if spec in COMPOSED:
        return kvlab.KVCache(model, **COMPOSED[spec]())
    return kvlab.make_cache(model, profiled(spec, model))


def decoded(model, spec: str):
    """Logits of a prompt of two rows and of three steps, a fork among them, and the cache."""
    cache = make(model, spec)
    stepper = kvlab.Stepper(model, cache)
    found = [stepper.feed(prompt(18, rows=2), last=True)]
    for step in range(3):
        if step == 1:
            stepper.fork(torch.tensor([1, 0, 1]))
        found.append(stepper.feed(prompt(1, rows=3 if step else 2, seed=step)))
    return found, cache


EVICTING = [spec for spec in EVERY if "kvzip" not in spec and make(tiny("llama"), spec).layers[0].evicts]
