"""The named methods of the literature: one table, one function each. `spec.py` parses their specs.

The table does not import transformers, so a wrong name is refused at once; caches are imported when they are
made.
"""

from __future__ import annotations

from . import keep
from .finding import METHODS, enter, find, method
from .keep import H2O, AdaKV, Keep, Pool
from .named import CHOSEN, HOST, ROUNDED, WHOLE
from .parameters import check_one_of
from .place import Fetch, Host, InfiniGen, OnDemand, Quest, ShadowKV, TopK, Whole
from .store import (
    Codebook,
    Exact,
    Float4,
    Float8,
    Growing,
    Int,
    Kivi,
    NonUniform,
    Paged,
    PreRope,
    Rotated,
    Skipping,
    Smoothed,
    Static,
)


@method("full", WHOLE, same="", look="blue o -", technique="windows hold a window")
def _full():
    """Every key and value, in buffers that grow with each token."""
    return {}


@method("recompute", WHOLE, same="", look="orange X :", technique="no cache")
def _recompute():
    """No cache: the whole sequence is fed again for every token."""
    from .recompute import NoCache

    return {"cache": NoCache}


@method("static", WHOLE, same="length=80", look="blue s --", technique="one buffer")
def _static(length=None):
    """Every key and value, in a buffer allocated once and written in place."""
    return {"store": Static(length)}


@method("paged", WHOLE, "Kwon et al. 2023", same="block=7", look="blue P :", technique="blocks of tokens")
def _paged(blocks=None, block=16):
    """Every key and value, in blocks of tokens from one pool, shared between forks."""
    return {"store": Paged(blocks, block)}


@method("padded", WHOLE, "QC AI Research (n.d.)", look="blue X --", technique="padded windows")
def _padded(length=None, policy="double", extra=None, form="multi", numbers="fp32", chunk=64):
    """Every key and value, padded to length - 1 rows that a static-graph engine reads in place."""
    from .static_graph import PaddedCache, StaticGraphEngine
    from .static_graph.engine import check_parameters

    check_parameters(length, policy, numbers, extra, form, chunk)

    def make(model):
        options = {"numbers": numbers, "extra": extra, "form": form, "chunk": chunk}
        return PaddedCache(StaticGraphEngine(model, length, policy, **options))

    return {"cache": make}


def _turned(form: Exact, rotate) -> Exact:
    """The format with vectors rotated before they are rounded, or as it is."""
    if not (rotate is None or isinstance(rotate, bool) or rotate == "signs"):
        raise ValueError(f"rotate={rotate!r}: expected true, false or signs")
    return Rotated(form, rotate == "signs") if rotate else form


def _stored(form: Exact, values: Exact | None = None, sinks: int = 0, skip_layers=None) -> dict:
    """The policies of a method that rounds, except in layers that stay exact: `0+1+-1`, joined by +."""
    store = Growing(form, values, sinks)
    if skip_layers is None:
        return {"store": store}
    try:
        layers = [int(number) for number in str(skip_layers).split("+")]
    except ValueError:
        raise ValueError(f"skip_layers={skip_layers!r}: expected numbers of layers, as in 0+1+-1") from None
    return {"store": Skipping(store, layers)}


def integers(bits: int):
    """Decorator: a method of integers of this width, with its docstring and their parameters."""

    def enter(described):
        def policies(
            group=None, axis="group", symmetric=True, scale="fp16", nonfinite="refuse", smooth=None, sinks=0,
            rotate=None, skip_layers=None,
        ):  # fmt: skip
            form = _turned(Int(bits, group, axis, symmetric, scale, nonfinite), rotate)
            return _stored(form if smooth is None else Smoothed(form, smooth), form, sinks, skip_layers)

        policies.__doc__ = described.__doc__
        return policies

    return enter


@method("int8", ROUNDED, same="sinks=80", less="", look="sky ^ -", technique="8-bit integers")
@integers(8)
def _int8():
    """Keys and values as 8-bit integers with a scale per token and group of channels, or per axis."""


@method("int5", ROUNDED, same="sinks=80", less="", look="sky p -.", technique="5-bit integers")
@integers(5)
def _int5():
    """Keys and values as 5-bit integers, in planes of 4 bits and 1, with a scale as in int4."""


@method("int4", ROUNDED, same="sinks=80", less="group=4", look="sky v --", technique="4-bit integers")
@integers(4)
def _int4():
    """Keys and values as 4-bit integers, two a byte, with a scale per token and group, or per axis."""


@method(
    "int2", ROUNDED, same="sinks=80", less="group=4,symmetric=false", look="sky D :",
    technique="2-bit integers",
)  # fmt: skip
@integers(2)
def _int2():
    """Keys and values as 2-bit integers, four a byte: three levels, or four with a zero point."""


@method(
    "kivi2", ROUNDED, "Liu et al. 2024", same="recent=80", less="group=4,recent=6", look="sky X :",
    technique="2-bit integers",
)  # fmt: skip
def _kivi2(group=32, recent=32, nonfinite="refuse"):
    """2 bits: keys per channel in blocks of tokens, values per token, the most recent tokens as they are."""
    return {"store": Kivi(2, group, recent, nonfinite)}


@method(
    "kivi4", ROUNDED, "Liu et al. 2024", same="recent=80", less="group=3,recent=0", look="sky s --",
    technique="KIVI in 4 bits",
)  # fmt: skip
def _kivi4(group=32, recent=32, nonfinite="refuse"):
    """4 bits: keys per channel in blocks of tokens, values per token, the most recent tokens as they are."""
    return {"store": Kivi(4, group, recent, nonfinite)}


@method("fp8", ROUNDED, "Micikevicius et al. 2022", less="", look="sky d -.", technique="8-bit floats")
def _fp8(format="e4m3", axis=None, group=None, scale="fp16", nonfinite="refuse", skip_layers=None):
    """Keys and values as 8-bit floats, e4m3 or e5m2, without a scale unless axis names what shares one."""
    return _stored(Float8(format, axis, group, scale, nonfinite), skip_layers=skip_layers)


@method("nvfp4", ROUNDED, "Rouhani et al. 2023", less="", look="sky P -", technique="4-bit floats, NVIDIA's")
def _nvfp4(largest=6, nonfinite="refuse", skip_layers=None):
    """Keys and values as 4-bit floats; 16 channels of a token share an 8-bit float as their scale."""
    return _stored(Float4("nvfp4", largest, nonfinite), skip_layers=skip_layers)


@method(
    "mxfp4", ROUNDED, "Rouhani et al. 2023", less="", look="sky h --",
    technique="4-bit floats, microscaling",
)  # fmt: skip
def _mxfp4(nonfinite="refuse", skip_layers=None):
    """Keys and values as 4-bit floats; 32 channels of a token share a power of two as their scale."""
    return _stored(Float4("mxfp4", 6, nonfinite), skip_layers=skip_layers)


@method(
    "turboquant", ROUNDED, "Zandieh et al. 2025", less="", look="sky * -.",
    technique="rotation, 3 and 4 bits",
)  # fmt: skip
def _turboquant(bits=4, sketch=False, nonfinite="refuse", skip_layers=None):
    """Vectors turned at random, then for every channel the nearest of few levels, the same for all models."""
    keys, values = (Rotated(Codebook(bits, kind, nonfinite), True) for kind in (sketch, False))
    return _stored(keys, values, skip_layers=skip_layers)


@method(
    "kvquant", ROUNDED, "Hooper et al. 2024", same="sinks=80", less="", look="sky H :",
    technique="keys before RoPE, levels of their own",
)  # fmt: skip
def _kvquant(bits=3, outliers=0.01, sinks=1, nonfinite="refuse"):
    """Keys before RoPE by channel, values by token; levels where the prompt's numbers are, outliers exact."""
    sides = (NonUniform(bits, axis, outliers, nonfinite) for axis in ("channel", "token"))
    return {"store": PreRope(*sides, sinks)}


@method("mixed", ROUNDED, same="k=full,v=full", less="", look="sky 8 -.", technique="K and V in two formats")
def _mixed(k="int8", v="int4", group=None, rotate=None, skip_layers=None):
    """Keys in one format and values in another, by the names of methods."""
    rounding = [name for name, one in METHODS.items() if one.family == ROUNDED and name != "mixed"]
    sides, known = [], ["full", *filter(_format_of, rounding)]
    for side, name in (("k", k), ("v", v)):
        check_one_of(side, name, known)
        given = {"group": group, "rotate": rotate}
        given = {name: value for name, value in given.items() if value is not None}
        for parameter in given.keys() - METHODS[name].parameters.keys():
            raise ValueError(f"{parameter}={given[parameter]}: {name} has no such parameter")
        sides.append(_format_of(name, **given))
    return _stored(*sides, skip_layers=skip_layers)


def _format_of(name: str, **parameters) -> Exact | None:
    """The format of a method that has only a format, K's if K and V have two; None for other methods."""
    policies = METHODS[name].policies(**parameters)
    store = policies.get("store", Growing())
    return store.format if policies.keys() <= {"store"} and type(store) is Growing else None


for kind in (getattr(keep, name) for name in keep.__all__):
    enter(kind)


@method(
    "adakv", CHOSEN, "Feng et al. 2024", same="budget=1", less="of=keydiff,budget=0.4", look="green d -",
    technique="eviction by attention",
)  # fmt: skip
def _adakv(of="snapkv", budget=0.2, safeguard=0.2, turns="all"):
    """As another method, with one budget for all heads of a layer: some then hold more than others."""
    if ":" in str(of):
        raise ValueError(f"of={of}: expected a method's name without parameters of its own, as snapkv")
    scoring = find(str(of))
    given = {"budget": budget, "turns": turns}
    policies = scoring.policies(**given) if given.keys() <= scoring.parameters.keys() else {}
    if [*policies] != ["keep"]:
        raise ValueError(f"of={of}: expected a method that scores tokens and does nothing else, as snapkv")
    return {"keep": AdaKV(policies["keep"], safeguard)}


def _hosted(fetch: Fetch, link, form: Exact | None = None, keep: Keep | None = None) -> dict:
    """The policies of a method on the host."""
    place = {"store": Growing(form), "place": Host(fetch, link)}
    return place if keep is None else place | {"keep": keep}


@method("offload", HOST, "Sheng et al. 2023", same="", look="ochre o -", technique="cache on the host")
def _offload(link=None):
    """All tokens on the host; each step fetches every layer whole, while the layer before computes."""
    return _hosted(Whole(), link)


@method(
    "offload+int4", HOST, "Sheng et al. 2023", less="link=1e9", look="ochre v --",
    technique="cache on the host, in 4 bits",
)  # fmt: skip
def _offload_int4(group=None, link=None, rotate=None):
    """As offload, with keys and values as 4-bit integers on the host and on the link."""
    return _hosted(Whole(), link, form=_turned(Int(4, group), rotate))


@method(
    "offload+h2o", HOST, "Sheng et al. 2023, Zhang et al. 2023", same="budget=1",
    less="budget=0.4,link=1e9", look="ochre h -.", technique="cache on the host, evicting",
)  # fmt: skip
def _offload_h2o(budget=0.2, recent=H2O.recent, link=None, turns="all"):
    """As offload, for the tokens that h2o keeps; the rest is dropped."""
    return _hosted(Whole(), link, keep=H2O(budget, recent, turns=turns))


@method("uvm", HOST, "Lee et al. 2024", same="", look="ochre s -", technique="unified memory")
def _uvm(memory=0.5, page=65536, fault=2e-6, link=None):
    """Unified memory: pages cross the link when they are touched, unless the cache fits on the device."""
    return _hosted(OnDemand(memory, page, fault), link)


@method(
    "uvm+h2o", HOST, "Lee et al. 2024", same="budget=1,memory=1", less="budget=0.4,link=1e9",
    look="ochre H --", technique="unified memory, evicting",
)  # fmt: skip
def _uvm_h2o(budget=0.2, recent=H2O.recent, memory=0.5, page=65536, fault=2e-6, link=None, turns="all"):
    """As uvm, for the tokens that h2o keeps, which may fit on the device."""
    return _hosted(OnDemand(memory, page, fault), link, keep=H2O(budget, recent, turns=turns))


@method(
    "topk", HOST, "Gupta et al. 2021", same="budget=1", less="budget=0.3", look="vermillion * -",
    technique="fetch what scores high",
)  # fmt: skip
def _topk(budget=0.2, full_layers=0, link=None):
    """All tokens on the host; each step fetches those with the largest true attention scores."""
    return _hosted(TopK(budget, full_layers), link)


@method(
    "infinigen", HOST, "Lee et al. 2024", same="budget=1,alpha=inf,ratio=1,full_layers=1",
    less="budget=0.3,alpha=4", look="vermillion p --", technique="fetch by a rehearsal",
)  # fmt: skip
def _infinigen(
    budget=0.2, alpha=InfiniGen.alpha, ratio=InfiniGen.ratio, full_layers=InfiniGen.full_layers,
    variant="paper", pool=1, victim="counter", link=None, turns="all",
):  # fmt: skip
    """All tokens on the host; each step fetches those a rehearsal one layer earlier found important."""
    fetch = InfiniGen(budget, alpha, ratio, full_layers, variant=variant)
    return _hosted(fetch, link, keep=Pool(pool, victim, turns=turns))


@method(
    "infinigen+int4", HOST, "Lee et al. 2024", less="budget=0.3,alpha=inf,full_layers=1",
    look="vermillion v :", technique="fetch by a rehearsal",
)  # fmt: skip
def _infinigen_int4(
    budget=0.2, alpha=InfiniGen.alpha, ratio=InfiniGen.ratio, full_layers=InfiniGen.full_layers, group=None,
    link=None,
):  # fmt: skip
    """As infinigen, with keys and values as 4-bit integers on the host and on the link."""
    fetch = InfiniGen(budget, alpha, ratio, full_layers)
    return _hosted(fetch, link, Int(4, group))


@method(
    "quest", HOST, "Tang et al. 2024", same="budget=80,page=4,full_layers=1",
    less="budget=0.4,page=3,full_layers=1", look="vermillion d -", technique="fetch pages by bounds",
)  # fmt: skip
def _quest(budget=0.2, page=16, full_layers=2, digest="bounds", link=None):
    """All tokens on the host; each step fetches the pages whose key bounds allow the largest scores."""
    return _hosted(Quest(budget, full_layers, page, digest), link)


@method(
    "quest+int8", HOST, "Tang et al. 2024", less="budget=0.4,page=3,full_layers=1", look="vermillion ^ --",
    technique="fetch pages by bounds",
)  # fmt: skip
def _quest_int8(budget=0.2, page=16, full_layers=2, group=None, link=None):
    """As quest, with keys and values as 8-bit integers on the host and on the link."""
    return _hosted(Quest(budget, full_layers, page), link, Int(8, group))


@method(
    "shadowkv", HOST, "Sun et al. 2024", same="budget=1,rank=1",
    less="budget=0.3,rank=0.4,chunk=3,recent=1", look="vermillion D -.",
    technique="keys of few dimensions, values fetched",
)  # fmt: skip
def _shadowkv(budget=0.2, rank=0.156, chunk=8, outliers=0.05, recent=4):
    """Few numbers of every key on the device, values on the host; each step fetches those of some chunks."""
    return {"place": ShadowKV(budget, rank, chunk, outliers, recent)}


FIRST_WAVE = (
    "full", "recompute", "static", "int8", "int4", "fp8", "sinks", "h2o", "topk", "infinigen",
)  # fmt: skip
