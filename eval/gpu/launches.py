"""Launches: the host's own time for a step, operator by operator, since no kernel starts before it is
launched. A thin model has as many operators as a wide one and nothing else."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvlab
from kvlab.spec import parse

from . import models

LAYERS, TOKENS, REPEATS = 32, 128, 5  # of the thin model, in its cache, and steps that are timed


class Operators(TorchDispatchMode):
    """Counts what is asked of torch while it lasts, views among it: the host needs time for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, given=(), named=None):
        self.count += 1
        return operator(*given, **(named or {}))


@cache
def thin(device: torch.device):
    """An OPT of many layers that are next to nothing."""
    from transformers import AutoModelForCausalLM, OPTConfig

    shape = {"hidden_size": 512, "ffn_dim": 512, "num_attention_heads": 4, "word_embed_proj_dim": 512}
    config = OPTConfig(**shape, num_hidden_layers=LAYERS, vocab_size=64, max_position_embeddings=2 * TOKENS)
    with torch.device(device):
        return kvlab.prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())


@dataclass(frozen=True)
class Launches:
    """operator: seconds of the host for one operator; layer: {system: operators of a layer in a step}."""

    operator: float
    layer: dict[str, float]

    def of(self, system: str) -> float:
        """Seconds of the host for a layer."""
        return self.operator * self.layer[system]


@torch.no_grad()
def counted(model, cache, ids) -> float:
    """Operators of a decode step, for each layer of the model."""
    with Operators() as operators:
        model(ids, past_key_values=cache)
    return operators.count / model.config.num_hidden_layers


def measured(bench, systems: dict[str, str], link) -> Launches:
    """Of these systems: {name: method}; link(): a link for those that take one. The time of an operator is
    that of a step of `full`."""
    model, ids = thin(bench.device), models.next_ids(bench, 1)
    layer = {}
    for system, method in systems.items():
        spec = parse(method)
        more = {"link": link()} if "link" in spec.method.parameters else {}
        if "length" in spec.method.parameters:
            more["length"] = 2 * TOKENS
        cache = kvlab.make_cache(model, type(spec)(spec.text, spec.method, spec.parameters | more))
        models.fill(bench, model, cache, TOKENS, 1)
        step = lambda cache=cache: model(ids, past_key_values=cache)
        with torch.no_grad():
            step()
            layer[system] = counted(model, cache, ids)
            if system == "full":
                times = bench.interleaved({"step": step}, REPEATS, bench.wall)["step"]
    return Launches(statistics.median(times) / 1e3 / LAYERS / layer["full"], layer)
