"""Tried: every method on a twin of a model, at the setting at which it gives nothing up."""

from __future__ import annotations

from .make import make_cache
from .methods import METHODS
from .models import prepare, refusal, refused_layers
from .models.shrunk import twin_of
from .twin import differs

# method -> the setting at which it gives nothing up
SPECS = {name: one.spec(one.same) for name, one in METHODS.items() if one.same is not None}


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
    for name, spec in SPECS.items():
        if name != "recompute":
            found[name] = differs(config, lambda model, spec=spec: make_cache(model, spec)) or "equal"
    return found
