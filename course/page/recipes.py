"""Recipes: what the page's bill must know of every method, read from its policies, and the bill's tables.

`kvlab/bill/account.py` asks the policies themselves; bill.js gets the few numbers that their answers hang on.
A method whose answers hang on more is named on the page as left out, with the reason.
"""

from __future__ import annotations

from kvlab.bill.account import policies
from kvlab.bill.bill import MOST
from kvlab.bill.data import table
from kvlab.bill.show import explained
from kvlab.keep import AdaKV, Keep, PyramidKV
from kvlab.methods import METHODS
from kvlab.place import Device, Host, InfiniGen, OnDemand, Quest, TopK, Whole
from kvlab.spec import parse
from kvlab.static_graph.kv_manager import spare_part
from kvlab.store import Kivi, Paged, Static

READ = ("context", "layers", "kinds", "weights", "experts")  # of a model's entry
LIMITS = (Keep.limits, PyramidKV.limits, AdaKV.limits)  # how many tokens stay, as bill.js counts them
FETCHES = (Whole, OnDemand, TopK, InfiniGen, Quest)


def tables() -> dict:
    """Models, devices, flags, recipes, and the words under the table, for bill.js and panel.js."""
    flags, models = table("flags"), table("models")["models"]
    recipes, left = {}, {}
    for name in METHODS:
        try:
            recipes[name] = recipe(name, models)
        except ValueError as error:
            left[name] = str(error)
    return {
        "models": {name: {key: model[key] for key in READ} for name, model in models.items()},
        "devices": {
            name: {key: device[key] for key in ("memory", "bandwidth", "flops", "link")}
            for name, device in table("devices")["devices"].items()
        },
        "flags": {key: flags[key] for key in ("read", "engines", "techniques")},
        "recipes": recipes,
        "left": left,
        "notes": explained("all users", True, {}, [name for name, one in recipes.items() if one.get("most")]),
        "most": MOST,
    }


def recipe(name: str, models: dict) -> dict:
    """What bill.js knows a method by. ValueError, with the reason, where it cannot.

    budget: the method's own, or None. keep: None, or its budget (and window and beta where layers share
    unequally). bits: see `bits`. buffer: "all" that there is room for, tokens of a block, or None. place:
    None, or what a step fetches. most: as in `Account`. Two are no policies: `{"recompute": True}` and
    `{"padded": {spare, bits}}`.
    """
    spec = parse(name)
    budget = spec.method.parameters.get("budget")
    if name == "recompute":
        return {"budget": None, "recompute": True}
    if name == "padded":
        given = spec.method.parameters
        spare = spare_part(given["policy"], given["extra"])
        return {"budget": None, "padded": {"spare": spare, "bits": 16}}
    made = policies(spec)
    if not made:
        raise ValueError("it is no set of policies")
    keep, store, place = made["keep"], made["store"], made["place"]
    keeping = keep.of if isinstance(keep, AdaKV) else keep
    if keep.evicts and not {type(keep).limits, type(keeping).limits} <= set(LIMITS):
        raise ValueError("it shares its budget among layers in a way of its own")
    if type(place) not in (Device, Host) or (place.on_host and type(place.fetch) not in FETCHES):
        raise ValueError("what it holds on the device beside a host is of its own kind")
    if store.of(0, 9) != store:
        raise ValueError("its layers have different stores")
    store.suits(keep, place)
    parts = ("budget", "window", "beta") if isinstance(keep, PyramidKV) else ("budget",)
    buffer = "all" if isinstance(store, Static) else store.pool.block if isinstance(store, Paged) else None
    fetch = place.fetch if place.on_host else None
    return {
        "budget": budget,
        "keep": {part: getattr(keep, part) for part in parts} if keep.evicts else None,
        "bits": bits(store, models),
        "buffer": buffer,
        "place": fetching(fetch) if fetch else None,
        "most": isinstance(fetch, InfiniGen),
    }


def fetching(fetch) -> dict:
    """What a step brings from the host. full: first layers that are fetched whole."""
    if isinstance(fetch, TopK):
        ratio = fetch.ratio if isinstance(fetch, InfiniGen) else None
        page = fetch.page if isinstance(fetch, Quest) else None
        full = max(fetch.full_layers, int(fetch.speculates))  # nobody guesses for the first one
        return {
            "budget": fetch.budget, "full": full, "ratio": ratio, "page": page,
            "fewest": None if page is None else fetch.pages(0),
        }  # fmt: skip
    return {"pages": isinstance(fetch, OnDemand)}


def bits(store, models: dict) -> dict:
    """Bits of a token's key and value together, by the layers that there are: {"heads,key,value": [a, b]} for
    a + b / tokens held, or the reason why such a layer is refused; or what a Kivi needs. ValueError where
    they hang on the tokens in another way."""
    if isinstance(store, Kivi):
        return {"codes": store.format.bits, "group": store.group, "recent": store.recent}
    kinds = {
        tuple(kind[part] for part in ("heads", "key", "value"))
        for model in models.values()
        for kind in model["kinds"].values()
    }
    return {",".join(map(str, kind)): slot_bits(store, *kind) for kind in sorted(kinds) if kind[0]}


def slot_bits(store, heads: int, key: int, value: int) -> list[float] | str:
    try:
        store.format.check(key)
        store.values.check(value)
    except ValueError as error:
        return str(error)

    def at(held: int) -> float:
        return sum(width * store.bits_per_value((heads, held, width)) for width in (key, value))

    grows = 2 * (at(1024) - at(2048)) * 1024
    always = at(1024) - grows / 1024
    if any(abs(at(held) - always - grows / held) > 1e-9 * at(held) for held in (1, 3, 17, 100, 5000)):
        raise ValueError("its bits hang on the tokens held in a way of their own")
    return [always, grows]
