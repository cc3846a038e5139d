"""Make: a model with its engine and a cache for it, from a spec or a file, or one line that says why not."""

from __future__ import annotations

from pathlib import Path

from .cache import KVCache
from .faster import compiled, graphed
from .finding import put, role_of
from .measure.machines import link_named
from .models import loading
from .models.shape import check_model
from .modes import keeping
from .parameters import check_one_of
from .policy import Policy
from .random_model import serve
from .saved import fill, opened
from .spec import Spec, parse

ENGINES = ("eager", "compiled", "graph")
WEIGHTS = ("fp32", "bf16", "int8")  # of the compiled engine


def load(
    name_or_path=None, *, device=None, dtype=None, engine="eager", weights="fp32", device_map=None,
    tensor_parallel=False,
):  # fmt: skip
    """Load a model ready for kvlab caches, and its tokenizer; returns (model in eval mode, tokenizer).

    engine: computes a decode step: "eager" (the model's own modules), "compiled" (on a CPU, see
    `kvlab.fast.compiled`) or "graph" (on a GPU, see `kvlab.fast.graph`). weights: "fp32", or "bf16" or "int8"
    with the compiled engine, whose outputs then differ a little (see `kvlab.fast.narrow`). Other arguments
    and errors: see `models.load`. ValueError for weights that no engine reads, for a model that cannot have
    them, and for the graph engine if the model is not on a GPU.
    """
    check_one_of("engine", engine, ENGINES)
    check_one_of("weights", weights, WEIGHTS)
    if weights != "fp32" and engine != "compiled":
        raise ValueError(f"weights={weights!r}: the {engine} engine reads fp32 alone; add engine='compiled'")
    where = {"device": device, "device_map": device_map, "tensor_parallel": tensor_parallel}
    model, tokenizer = loading.load(name_or_path, dtype=dtype, **where)
    if engine == "compiled":
        compiled(model, weights)
    elif engine == "graph":
        graphed(model)
    return model, tokenizer


@keeping()
def make_cache(model, spec: str | Spec | Policy | type[Policy]):
    """A fresh cache for `model` from a spec such as `"int4"` or `"h2o:budget=0.2"` (see `parse`), or from a
    keep, store, format, place or fetch, or its class: `H2O(0.2)`."""
    check_model(model)
    if (role := role_of(spec)) is not None:
        policies = put(role, spec() if isinstance(spec, type) else spec)
        serve(model, guesses=_guesses(policies))
        return KVCache(model, **policies)
    spec = parse(spec)
    try:
        parameters = dict(spec.parameters)
        if "link" in parameters:
            parameters["link"] = link_named(parameters["link"], model)
        policies = spec.method.policies(**parameters)
        _check_kinds(spec)
        serve(model, holds=spec.name != "recompute", guesses=_guesses(policies))
        make = policies.pop("cache", KVCache)  # a class or function of the model, instead of a KVCache
        cache = make(model, **policies)
        if (full := spec.parameters.get("full_layers", 0)) > len(cache.layers):
            raise ValueError(f"full_layers={full}: the model has {len(cache.layers)} layers")
        cache.spec = spec
        return cache
    except (ValueError, TypeError) as error:
        raise ValueError(f"method {spec.text!r}: {error}") from error


def _guesses(policies: dict) -> bool:
    """Whether a method asks for a layer's query before its turn."""
    return getattr(getattr(policies.get("place"), "fetch", None), "speculates", False)


@keeping()
def load_cache(path: str | Path, model):
    """The cache that `cache.save(path)` wrote, for the same model: it answers like the saved one.

    Raises ValueError for a file that is no cache, was saved for another model, is damaged or has parts that
    do not fit, and for a method of your own whose module is not imported yet.
    """
    check_model(model)
    about, tensors = opened(path, model)
    cache = make_cache(model, about["method"])
    fill(cache, about, tensors, path)
    return cache


def _check_kinds(spec: Spec) -> None:
    """ValueError for true or false in place of another type, or the reverse, which the policies accepted."""
    for name, value in spec.parameters.items():
        default = spec.method.parameters[name]
        if default is not None and isinstance(default, bool) != isinstance(value, bool):
            wanted = "true or false" if isinstance(default, bool) else "a number or a name"
            raise ValueError(f"{name}={value}: expected {wanted}")
