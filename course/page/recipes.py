"""Recipes: what the page's bill must know of every method, read from its policies, and the bill's tables.

`kvlab/bill/account.py` asks the policies themselves; bill.js gets the few numbers that their answers hang on.
"""

from __future__ import annotations

from kvlab.bill.account import policies
from kvlab.bill.data import table
from kvlab.keep import PyramidKV
from kvlab.methods import METHODS
from kvlab.place import InfiniGen, OnDemand, TopK
from kvlab.spec import parse
from kvlab.store import Kivi, Paged, Static

# a static graph; no cache at all; one whose bits hang on the tokens, and what has an index of pages or chunks
LEFT_OUT = ("padded", "recompute", "kvquant", "quest", "quest+int8", "shadowkv")
READ = ("context", "layers", "kinds", "weights", "experts")  # of a model's entry


def tables() -> dict:
    """Models, devices, flags and recipes, for bill.js."""
    flags = table("flags")
    return {
        "models": {
            name: {key: model[key] for key in READ} for name, model in table("models")["models"].items()
        },
        "devices": {
            name: {key: device[key] for key in ("memory", "bandwidth", "flops", "link")}
            for name, device in table("devices")["devices"].items()
        },
        "flags": {key: flags[key] for key in ("read", "engines", "techniques")},
        "recipes": {name: recipe(name) for name in METHODS if name not in LEFT_OUT},
    }


def recipe(name: str) -> dict:
    """keep: None, or its budget (and window and beta where layers share unequally). bits: [a, b] for a + b /
    width per number, or what a Kivi needs. buffer: "all" that there is room for, tokens of a block, or None.
    place: None, or what a step fetches."""
    made = policies(parse(name))
    keep, store, place = made["keep"], made["store"], made["place"]
    parts = ("budget", "window", "beta") if isinstance(keep, PyramidKV) else ("budget",)
    buffer = "all" if isinstance(store, Static) else store.pool.block if isinstance(store, Paged) else None
    return {
        "keep": {part: getattr(keep, part) for part in parts} if keep.evicts else None,
        "bits": bits(store),
        "buffer": buffer,
        "place": fetching(place.fetch) if place.on_host else None,
    }


def fetching(fetch) -> dict:
    """What a step brings from the host."""
    if isinstance(fetch, TopK):
        ratio = fetch.ratio if isinstance(fetch, InfiniGen) else None
        return {"budget": fetch.budget, "full": fetch.full_layers, "ratio": ratio}
    return {"pages": isinstance(fetch, OnDemand)}


def bits(store) -> list[float] | dict:
    """Bits per number of K and V as a function of the head dimension. ValueError where there is none."""
    if isinstance(store, Kivi):
        return {"codes": store.format.bits, "group": store.group, "recent": store.recent}
    at = {width: store.bits_per_value((8, 1000, width)) for width in (64, 128, 256)}
    scale = (at[64] - at[128]) * 128
    base = at[64] - scale / 64
    if at[256] != base + scale / 256 or store.bits_per_value((4, 10, 64)) != at[64]:
        raise ValueError(f"{store}: its bits hang on more than the head dimension; bill.js must learn it")
    return [base, scale]
