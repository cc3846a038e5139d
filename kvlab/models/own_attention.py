"""Own attention: a model that attends by a function of a user's own is refused, and says so in one line."""

from __future__ import annotations

import sys
from functools import partial

from ..interface import NAME


def check(body) -> None:
    """ValueError where a model attends through a function of a user's own: kvlab's would take its place."""
    from transformers import AttentionInterface

    name = body.config._attn_implementation
    if name == NAME or "/" in (name or ""):  # a pass inside one of this model, or a kernel of the hub
        return
    registered = AttentionInterface().get(name)
    homes = {type(part).__module__ for part in body.modules()} if registered is None else {""}
    for home in homes:
        function = registered or getattr(sys.modules.get(home), "eager_attention_forward", None)
        written_in = _written_in(function)
        near = (
            home.startswith("transformers_modules.")
            and home.rpartition(".")[0] == written_in.rpartition(".")[0]
        )
        theirs = near or written_in == home or written_in.startswith("transformers.")
        if function is not None and not theirs:
            what = f"a function of {written_in}, " + ("registered as" if registered else "in the place of")
            raise ValueError(
                f"the model attends through {what} {name!r}, and a kvlab cache would take its place: pass "
                "another cache, or set an attention implementation of transformers"
            )


def _written_in(function) -> str:
    """The module that a function was written in, whatever it calls itself, or torch wraps around it."""
    while True:
        module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if isinstance(function, partial):
            function = function.func
        elif module.startswith("torch.") and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return module
