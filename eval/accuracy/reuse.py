"""Reuse: a cache with the context's tokens that another one held with a different question inside."""

from __future__ import annotations

from torch import Tensor

from kvlab.cache import KVCache
from kvlab.gather import among, in_order
from kvlab.keep import Keep
from kvlab.spec import Spec

from ..core.errors import Problem
from .protocols import REUSE


class Sets:
    """Which tokens stay: {layer: positions `[batch, kv_heads, n]`, -1 where a row has fewer}."""

    def __init__(self):
        self.stay: dict[int, Tensor] = {}

    def read(self, cache: KVCache, contexts: Tensor) -> None:
        """What a compressed cache holds of the first `contexts` `[batch]` tokens of each row."""
        for layer in cache.attending:
            held = layer.positions
            inside = (held >= 0) & (held < contexts.to(held.device).view(-1, 1, 1))
            order = inside.int().argsort(dim=-1, descending=True, stable=True)
            order = order[..., : int(inside.sum(-1).max())]
            stay = held.gather(-1, order).masked_fill(~inside.gather(-1, order), -1)
            self.stay[layer.index] = stay


class Chosen(Keep):
    """Keep the tokens of a prompt that another cache held, read as `like`, its keep, reads them."""

    once, newest_stays = True, False

    def __init__(self, sets: Sets, like: Keep):
        object.__setattr__(self, "budget", 0.5)  # not everything
        object.__setattr__(self, "renumber", like.renumber)
        self.sets, self.ragged = sets, like.ragged

    def choose(self, layer) -> Tensor | None:
        if layer.state.limits is not None:
            return None
        stay = self.sets.stay[layer.index]
        at = layer.slot_positions
        stays = among(stay, max(layer.lengths)).expand(*at.shape[:2], -1).gather(2, at.clamp(min=0).long())
        stays &= at >= 0
        layer.state.limits = layer.state.longest = stays.sum(-1).amax(-1).tolist()
        return in_order(stays)


def reusing(model, spec: Spec) -> tuple[KVCache, Sets] | None:
    """A cache of the method that holds what `Sets` says, for `reuse`; None for a method without a keep.
    Raises Problem where `check` does."""
    keep, policies = check(spec), spec.policies()
    if keep is None:
        return None
    sets = Sets()
    return KVCache(model, **policies | {"keep": Chosen(sets, keep)}), sets


def check(spec: Spec) -> Keep | None:
    """The method's keep, None where nothing goes. Raises Problem for one of which more than a choice of
    tokens would have to be carried from one question to another."""
    policies = spec.policies()
    keep = policies.get("keep")
    if "cache" in policies or not getattr(keep, "evicts", False):
        return None
    for name, why in (("merge", "what the other question left is in the tokens that stay"),
                      ("every", "what stays is the context's, and nothing of it goes any more")):  # fmt: skip
        if getattr(keep, name):
            raise Problem(f"method {spec.text}: {name} under protocol {REUSE}: {why}; use another protocol")
    return keep
