"""Narrow: linear layers whose weights are held in bf16 or int8, which the compiled engine widens as it reads.

A step on one token waits for its weights, so half or a quarter of the bytes is less to wait for. That changes
the model: bf16 keeps 8 bits of every weight's fraction; int8 rounds a row (all weights of one output) to
whole multiples of its largest magnitude / 127. Norms and biases stay in fp32, and so does all arithmetic; an
embedding is narrow where it is the head's matrix too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

WEIGHTS = ("fp32", "bf16", "int8")
CODES = "this model holds narrow weights: load it without weights= to read or change them"


class Narrow(nn.Module):
    """A weight `[out, in]` in `codes`, which modules that use the same one share.

    codes: parameter, int16 (the upper half of an fp32 number's bits, rounded to even) or int8; scale:
    parameter, fp32 `[out]`, or None for bf16. Integers, so that nothing takes them for numbers of the model's
    dtype.
    """

    def __init__(self, codes: nn.Parameter, scale: nn.Parameter | None):
        super().__init__()
        self.codes, self.scale = codes, scale  # no `weight`: numbers and codes are not loaded for each other

    def __getattr__(self, name: str):
        """Other code would take codes for numbers, and write numbers into them."""
        if name == "weight":
            raise AttributeError(CODES)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            raise TypeError(CODES)
        super().__setattr__(name, value)

    @property
    def kind(self) -> str:
        return "bf16" if self.scale is None else "int8"

    def widened(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        """Rows of codes `[.., in]`, and their scales `[..]`, as fp32."""
        return codes.view(torch.bfloat16).float() if scale is None else codes.float() * scale[..., None]


class NarrowLinear(Narrow):
    """`nn.Linear` of narrow weights: widens all of them at every call, as a prompt is worth."""

    def __init__(self, codes: nn.Parameter, scale: nn.Parameter | None, bias: nn.Parameter | None):
        super().__init__(codes, scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.widened(self.codes, self.scale).to(x.dtype), self.bias)


class NarrowEmbedding(Narrow):
    """`nn.Embedding` of narrow weights."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.widened(self.codes[ids], None if self.scale is None else self.scale[ids])


@torch.no_grad()
def narrow(model, kind: str) -> None:
    """Hold the weights of the model's linear layers as `kind`, "bf16" or "int8", and give the fp32 ones back.

    ValueError, and nothing has changed, for a weight with NaN or infinity.
    """
    layers = {name: one for name, one in model.named_modules() if type(one) is nn.Linear}
    for name, one in layers.items():
        if not one.weight.isfinite().all():
            raise ValueError(f"weights={kind!r}: weight '{name}.weight' holds NaN or infinity")
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = type(table) is nn.Embedding and head is not None and head.weight is table.weight
    for name, one in layers.items():
        codes, scale = rounded(one.weight, kind)
        both = nn.Parameter(codes, False), None if scale is None else nn.Parameter(scale, False)
        model.set_submodule(name, NarrowLinear(*both, one.bias).train(model.training))
        if tied and one is head:
            model.set_input_embeddings(NarrowEmbedding(*both).train(model.training))
    model.save_pretrained, model.tie_weights = _unwritten, _tied


def _unwritten(*_, **__):
    raise TypeError("narrow weights are how one process holds a model: load it without weights= to write it")


def _tied(*_, **__) -> None:
    """An embedding and a head that shared a weight share its codes."""


def rounded(weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """The codes of a weight `[out, in]`, fp32, and for int8 the scale of every row."""
    if kind == "bf16":
        return weight.bfloat16().view(torch.int16), None
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return codes, scale


def weights_of(model) -> str:
    """How the model holds the weights of its linear layers: "fp32" (or whatever dtype it has), "bf16" or
    "int8"."""
    return next((one.kind for one in model.modules() if isinstance(one, Narrow)), "fp32")
