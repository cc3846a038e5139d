"""The graph: one pass of a model whose past K and V are inputs and whose new K and V are outputs.

Every size is fixed. Per layer, and in the single-head form per head, a past K or V is an input
`[1, heads, S - 1, D]`, the new one an output `[1, heads, width, D]`; inside, the two are concatenated to
`[1, heads, S - 1 + width, D]` (QC AI Research, n.d.). A step has width 1 and is exported; the chunks of a
prompt are wider, and torch runs the same module on them.

The model's own modules run unchanged: a cache layer stands where a cache stands, and attends in a way that
can be exported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention import attending
from ..models import ModelShape
from .quantized import dequantize, quantize

GRAPH = (
    "the static graph knows layers that see its newest tokens, all of them, without soft caps and sink scores"
)


class Quantizer:
    """Q and DQ nodes with the scales of one K or V sequence: `[heads]`, fixed before any token is seen.
    Outside an export, what they compute."""

    def __init__(self, scale: Tensor, opset: int):
        self.scale, self.version = scale, opset

    def _node(self, kind: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        zero = torch.zeros(len(self.scale), dtype=torch.int8)
        inputs = [x, self.scale, zero] if len(self.scale) > 1 else [x, self.scale[0], zero[0]]
        attributes = {"axis": 1} if len(self.scale) > 1 else {}
        return torch.onnx.ops.symbolic(
            kind, inputs, attributes, dtype=dtype, shape=x.shape, version=self.version
        )

    def quantize(self, x: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        return self._node("QuantizeLinear", x, torch.int8) if exporting else quantize(x, self.scale)

    def dequantize(self, x: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        return self._node("DequantizeLinear", x, torch.float32) if exporting else dequantize(x, self.scale)


class StaticLayer(CacheLayerMixin):
    """One layer's past, `parts` sequences of `heads` KV heads each, and after the pass its new K and V."""

    is_sliding = False

    def __init__(self, past: list[list[Tensor]], mask: Tensor, quantizers):
        super().__init__()
        self.past, self.mask, self.quantizers = past, mask, quantizers
        self.new: list[list[Tensor]] = []
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        self._fresh = key_states, value_states
        return self, self

    def get_seq_length(self) -> int:
        return 0  # positions are an input

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # and so is the mask

    def get_max_length(self) -> int:
        return -1

    def _join(self, kind: int, part: int, new: Tensor) -> Tensor:
        """Past and new, `[1, heads, S - 1 + width, D]`; int8 until after the concatenation when quantized."""
        if self.quantizers is None:
            self.new[kind].append(new)
            return torch.cat([self.past[kind][part], new], 2)
        quantizer = self.quantizers[kind][part]
        self.new[kind].append(quantizer.quantize(new))
        return quantizer.dequantize(torch.cat([self.past[kind][part], self.new[kind][-1]], 2))

    def attend(self, query: Tensor, visibility, scaling: float, softcap=None, sinks=None) -> Tensor:
        """query `[1, query heads, width, D]` -> the same shape. What kvlab's attention function calls."""
        if softcap is not None or sinks is not None:
            raise ValueError(GRAPH)
        keys, values = self._fresh
        parts, (group, width) = len(self.past[0]), (query.shape[1] // keys.shape[1], query.shape[2])
        self.new, out = [[], []], []
        asked_and_new = (query * scaling, keys, values)
        split = (x.chunk(parts, dim=1) if parts > 1 else (x,) for x in asked_and_new)
        for part, (asked, key, value) in enumerate(zip(*split, strict=True)):
            held_keys, held_values = self._join(0, part, key), self._join(1, part, value)
            if group > 1:  # the query heads of a group are more queries of one KV head
                asked = asked.reshape(1, key.shape[1], group * width, -1)
            if torch.compiler.is_exporting():
                weights = (asked @ held_keys.transpose(2, 3) + self.mask).softmax(-1)
                found = weights @ held_values
            else:  # the same without a table of scores
                found = scaled_dot_product_attention(asked, held_keys, held_values, self.mask, scale=1.0)
            out.append(found.reshape(1, -1, width, query.shape[-1]))
        return torch.cat(out, dim=1)


class StaticStep(torch.nn.Module):
    """One pass: (token, position, mask, past...) -> (logits, new...). Exported for a width of 1.

    token and position int64 `[1, width]`, mask float32 `[1, 1, width, S - 1 + width]` to be added to the
    scores, past the sequences in the order of `sequence_names`; logits `[1, width, vocabulary]`.
    """

    def __init__(self, model, parts: int, scales: list[Tensor] | None = None, opset: int = 0):
        super().__init__()
        shape = ModelShape.of(model)
        self.model, self.parts, self.layers = model, parts, shape.layers
        self.group = shape.heads // shape.kv_heads
        self.quantizers = None if scales is None else [Quantizer(scale, opset) for scale in scales]

    def forward(self, token: Tensor, position: Tensor, mask: Tensor, past: list[Tensor]):
        layers = []
        if token.shape[1] > 1:  # a row of the mask for every query head of a group
            mask = mask.repeat(1, 1, self.group, 1)
        for index in range(self.layers):
            first, n = 2 * index * self.parts, self.parts
            pairs = (slice(first, first + n), slice(first + n, first + 2 * n))
            quantizers = None if self.quantizers is None else [self.quantizers[pair] for pair in pairs]
            layers.append(StaticLayer([past[pair] for pair in pairs], mask, quantizers))
        inputs = {"input_ids": token, "position_ids": position, "past_key_values": Cache(layers=layers)}
        with attending():
            logits = self.model(**inputs, use_cache=True).logits
        return logits, *(new for layer in layers for kind in layer.new for new in kind)


def sequence_names(layers: int, parts: int) -> list[str]:
    """`layer.k.part` for every sequence, in the order of the graph's inputs and outputs."""
    return [f"{layer}.{kind}.{part}" for layer in range(layers) for kind in "kv" for part in range(parts)]
