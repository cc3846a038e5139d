"""Keys: properties of a model's queries, keys and values before a cache rounds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import scores_of
from .reading import Reading

QUERIES = 32  # the last ones, whose scores are examined


@dataclass(frozen=True)
class LayerKeys:
    """One layer. outlier: the largest channel of a KV head, root mean square over tokens, beside the head's
    median channel; `head` and `channel` say which. bias: the largest number in W_k's bias (None: it has none,
    or none by that name). key, value: root mean square of a channel. sink: attention that the first token
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
    biases = biases_of(reading.model)
    return [_layer(given, biases.get(index)) for index, given in enumerate(reading.layers)]


def biases_of(model) -> dict[int, float]:
    """{layer: the largest number of its key projection's bias}, where a projection of its own has one."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            index = next(int(part) for part in name.split(".") if part.isdecimal())
            found[index] = float(parameter.detach().abs().max())
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
