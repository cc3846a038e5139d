"""The graph: one pass of a model whose past K and V are inputs and whose new K and V are outputs.

Every size is fixed. Per layer, and in the single-head form per head, a past K or V is an input
`[1, heads, S - 1, D]`, the new one an output `[1, heads, width, D]`; inside, the two are concatenated to
`[1, heads, S - 1 + width, D]` (QC AI Research, n.d.). A step has width 1; a chunk of a prompt, or guessed
tokens, use a wider one.

The model's own modules run unchanged: a cache layer takes the place of a cache, and attends in a way that can
be exported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.onnx.ops import symbolic
from transformers.cache_utils import Cache

from ..attention import attending
from ..contents import StandIn
from ..models import ModelShape, cache_name
from .quantized import QMAX, half

OPSET = 18
GRAPH = (
    "the static graph knows layers that see its newest tokens, all of them, without soft caps and sink scores"
)


class Plain:
    """How one K or V sequence is held, and attended to: as numbers of the model's own width."""

    dtype = torch.float32

    def __init__(self, scale: Tensor | None):
        self.scale = scale

    write = read = staticmethod(lambda x: x)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """query `[1, heads, n, D]`, keys as held `[1, heads, T, D]` -> `[1, heads, n, T]`."""
        return query @ self.read(keys).transpose(2, 3)

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights `[1, heads, n, T]`, values as held -> `[1, heads, n, D]`."""
        return weights @ self.read(values)


class Half(Plain):
    """In 16 bits; onnxruntime's CPU multiplies in 32."""

    dtype = torch.float16
    write, read = staticmethod(half), staticmethod(Tensor.float)


class Quantized(Plain):
    """As int8 with scales `[heads]`, fixed before any token is seen: nodes Q and DQ."""

    dtype = torch.int8

    def _node(self, kind: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        zero = torch.zeros(len(self.scale), dtype=torch.int8, device="cpu")
        inputs = [x, self.scale, zero] if len(self.scale) > 1 else [x, self.scale[0], zero[0]]
        attributes = {"axis": 1} if len(self.scale) > 1 else {}
        return symbolic(kind, inputs, attributes, dtype=dtype, shape=x.shape, version=OPSET)

    def write(self, x: Tensor) -> Tensor:
        return self._node("QuantizeLinear", x, torch.int8)

    def read(self, x: Tensor) -> Tensor:
        return self._node("DequantizeLinear", x, torch.float32)


class Integers(Quantized):
    """The same, and multiplied as integers: a query and the weights of its tokens are rounded as well, each
    row by its own largest, to 127 and 255."""

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        shape = (*left.shape[:-1], right.shape[-1])
        found = symbolic("MatMulInteger", [left, right], dtype=torch.int32, shape=shape, version=OPSET)
        return found.float()

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        step = query.abs().amax(-1, keepdim=True).clamp(min=1e-9) / QMAX
        codes = (query / step).round().to(torch.int8)
        products = self._product(keys, codes.transpose(2, 3))  # the other way round: keys are not turned
        return products.transpose(2, 3) * (step * self.scale[:, None, None])

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        step = weights.amax(-1, keepdim=True) / 255
        codes = (weights / step).round().to(torch.uint8)
        return self._product(codes, values) * (step * self.scale[:, None, None])


NUMBERS = {"fp32": Plain, "fp16": Half, "int8": Quantized, "integers": Integers}


class StaticLayer(StandIn):
    """One layer's past, `parts` sequences of `heads` KV heads each, and after the pass what is `written` of
    its new K and V. Positions and the mask are inputs, so no token counts as seen."""

    def __init__(self, past: list[list[Tensor]], mask: Tensor, forms: list[list[Plain]]):
        super().__init__()
        self.past, self.mask, self.forms = past, mask, forms
        self.written: list[list[Tensor]] = []
        self.is_initialized = True

    def _join(self, kind: int, part: int, new: Tensor) -> Tensor:
        """Past and new as they are held, `[1, heads, S - 1 + width, D]`."""
        self.written[kind].append(self.forms[kind][part].write(new))
        return torch.cat([self.past[kind][part], self.written[kind][-1]], 2)

    def attend(self, query: Tensor, visibility, scaling: float, softcap=None, sinks=None) -> Tensor:
        """query `[1, query heads, width, D]` -> the same shape. What kvlab's attention function calls."""
        if softcap is not None or sinks is not None:
            raise ValueError(GRAPH)
        keys, values = self.new
        parts, (group, width) = len(self.past[0]), (query.shape[1] // keys.shape[1], query.shape[2])
        self.written, out = [[], []], []
        asked_and_new = (query * scaling, keys, values)
        split = (x.chunk(parts, dim=1) if parts > 1 else (x,) for x in asked_and_new)
        for part, (asked, key, value) in enumerate(zip(*split, strict=True)):
            held_keys, held_values = self._join(0, part, key), self._join(1, part, value)
            if group > 1:  # the query heads of a group are more queries of one KV head
                asked = asked.reshape(1, key.shape[1], group * width, -1)
            weights = (self.forms[0][part].scores(asked, held_keys) + self.mask).softmax(-1)
            found = self.forms[1][part].mix(weights, held_values)
            out.append(found.reshape(1, -1, width, query.shape[-1]))
        return torch.cat(out, dim=1)


class StaticStep(torch.nn.Module):
    """One pass: (token, position, mask, past...) -> (logits, new...), to be exported.

    token and position int64 `[1, width]`, mask float32 `[1, 1, width, S - 1 + width]` to be added to the
    scores, past the sequences in the order of `sequence_names`; logits `[1, width, vocabulary]`. forms: how
    each of these is held.
    """

    def __init__(self, model, parts: int, forms: list[Plain]):
        super().__init__()
        shape = ModelShape.of(model)
        self.model, self.parts, self.layers = model, parts, shape.layers
        self.group = shape.heads // shape.kv_heads
        self.forms = forms

    def forward(self, token: Tensor, position: Tensor, mask: Tensor, past: list[Tensor]):
        layers = []
        if token.shape[1] > 1:  # a row of the mask for every query head of a group
            mask = mask.repeat(1, 1, self.group, 1)
        for index in range(self.layers):
            first, n = 2 * index * self.parts, self.parts
            pairs = (slice(first, first + n), slice(first + n, first + 2 * n))
            layers.append(StaticLayer([past[x] for x in pairs], mask, [self.forms[x] for x in pairs]))
        inputs = {"input_ids": token, "position_ids": position, cache_name(self.model): Cache(layers=layers)}
        with attending():
            logits = self.model(**inputs, use_cache=True).logits
        return logits, *(new for layer in layers for kind in layer.written for new in kind)


def sequence_names(layers: int, parts: int) -> list[str]:
    """`layer.k.part` for every sequence, in the order of the graph's inputs and outputs."""
    return [f"{layer}.{kind}.{part}" for layer in range(layers) for kind in "kv" for part in range(parts)]
