"""Keys: properties of a model's queries, keys and values before a cache rounds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import scores_of
from ..models import blocks_of
from .reading import Reading

QUERIES = 32  # the last ones, whose scores are examined


@dataclass(frozen=True)
class LayerKeys:
    """One layer. outlier: the largest channel of a KV head, root mean square over tokens, beside the head's
    median channel; `head` and `channel` say which. bias: the largest number in W_k's bias (None: it has none,
    or cannot be told). key, value: root mean square of a channel. sink: attention that the first token
    receives from the last one, mean over heads. channels: root mean square `[kv_heads][head_dim]`."""

    outlier: float
    head: int
    channel: int
    bias: float | None
    key: float
    value: float
    sink: float
    channels: list[list[float]]

    @property
    def said(self) -> str:
        """One line for people."""
        bias = "" if self.bias is None else f", the bias of W_k reaches {self.bias:.3g}"
        return (
            f"channel {self.channel} of KV head {self.head} is {self.outlier:.3g} times the median channel"
            f"{bias}; the first token receives {100 * self.sink:.0f} % of the attention"
        )


def keys_of(reading: Reading) -> list[LayerKeys]:
    """The `LayerKeys` of every layer that attends."""
    biases = biases_of(reading)
    return [_layer(given, bias) for given, bias in zip(reading.layers, biases, strict=True)]


@torch.no_grad()
def biases_of(reading: Reading) -> list[float | None]:
    """The largest number in the bias of every layer's W_k. Where it has no name of its own, that of the first
    token's key, which no RoPE turns, with an input of 0 to every attention module, if it is one of the
    module's biases: a norm or a factor may be behind them."""
    named = [one for name, one in reading.model.named_parameters() if name.endswith("k_proj.bias")]
    unknown: list[float | None] = [None] * len(reading.layers)
    if named:
        return [float(one.abs().max()) for one in named] if len(named) == len(unknown) else unknown
    called: list = []

    def zeroed(module, args, given):
        called.append(module)
        zero = torch.zeros_like
        given = {name: zero(x) if name == "hidden_states" else x for name, x in given.items()}
        return (zero(args[0]), *args[1:]) if args else (), given

    parts = [part for block in blocks_of(reading.model) for part in block.children()]
    hooks = [
        part.register_forward_pre_hook(zeroed, with_kwargs=True)
        for part in parts
        if "attention" in type(part).__name__.lower()
    ]
    try:
        layers = Reading.of(reading.model, reading.ids[:1, :1]).layers
    finally:
        for hook in hooks:
            hook.remove()
    if not len(called) == len(layers) == len(unknown):
        return unknown
    found = []
    for module, given in zip(called, layers, strict=True):
        largest = given.keys.abs().max()
        biases = [one.abs() for name, one in module.named_parameters() if name.endswith("bias")]
        own = any(one.isclose(largest, rtol=1e-3).any() for one in biases)
        found.append(float(largest) if own else None)
    return found


def _layer(given, bias: float | None) -> LayerKeys:
    size = given.keys.float().square().mean((0, 2)).sqrt()  # [kv_heads, head_dim]
    ratio = size / size.median(1, keepdim=True).values.clamp(min=1e-9)
    head, channel = divmod(int(ratio.argmax()), ratio.shape[1])
    newest = scores(given.query[:, :, -1:], given.keys, given.scaling, given.softcap).softmax(-1)
    value = float(given.values.float().square().mean().sqrt())
    key, sink = float(size.square().mean().sqrt()), float(newest[..., 0].mean())
    channels = [[float(f"{x:.4g}") for x in mine] for mine in size.tolist()]
    return LayerKeys(float(ratio.max()), head, channel, bias, key, value, sink, channels)


def scores(query: Tensor, keys: Tensor, scaling: float, softcap: float | None = None) -> Tensor:
    """`[batch, heads, queries, tokens]` of these queries and keys, grouped heads as the model has them."""
    share = query.shape[1] // keys.shape[1]
    return scores_of(query.float(), keys.float().repeat_interleave(share, 1), scaling, softcap)


@torch.no_grad()
def noise(reading: Reading, cache) -> list[float]:
    """The effect of a cache's rounding on the scores of every layer, in nats: how far the scores of the last
    queries move relative to each other, root mean square. A shift of all of a query's scores changes nothing.
    Empty if a cache does not hold every token in its place."""
    found = []
    for given, layer in zip(reading.layers, cache.attending, strict=False):
        layer.place.commit(layer)
        held, _ = layer.store.read(given.keys.device)
        if held.shape != given.keys.shape:
            return []
        moved = scores(given.query[:, :, -QUERIES:], held.float() - given.keys.float(), given.scaling)
        moved = moved - moved.mean(-1, keepdim=True)
        found.append(float(moved.square().mean().sqrt()))
    return found
