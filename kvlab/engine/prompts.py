"""Prompts: linear layers on many rows by oneDNN, where the library that torch takes idles half of a core.

torch's products of fp32 matrices on an x86 processor are MKL's, and MKL uses registers of 512 bits on Intel's
alone. oneDNN, which torch carries too, uses them on AMD's as well: 128 rows with a weight of 1,536 × 576 came
to 199 GFLOP/s where MKL did 102 (one thread of an AMD EPYC with AVX-512), its copies into oneDNN's layout and
out of it counted. Both round sums of fp32 products, in another order: 1e-6 of the largest apart.
While a call lasts it holds copies of its weight; none outlives it, so memory holds weights once.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LEAST = 32  # rows: with fewer, copying the weight takes longer than the product gains
BLOCK = 512  # rows at a time: what a block reads and writes stays in the processor's cache


class PromptLinear(nn.Linear):
    """`nn.Linear`, the same parameters, faster on many rows."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of x `[.., in]` and weight `[out, in]`: `[.., out]`, by oneDNN where that is faster."""
    if not (_many(x) and faster() and _suit(x, weight, bias)):
        return linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    given = weight.detach().to_mkldnn(), None if bias is None else bias.detach().to_mkldnn()
    if len(rows) <= BLOCK:
        out = linear(rows.to_mkldnn(), *given).to_dense()
    else:
        out = x.new_empty(len(rows), len(weight))
        for into, some in zip(out.split(BLOCK), rows.split(BLOCK), strict=True):
            into.copy_(linear(some.to_mkldnn(), *given).to_dense())
    return out.view(*x.shape[:-1], len(weight))


def by_blocks(model, does: bool = True) -> None:
    """Let the model's linear layers use it, where it is faster on this machine, or no longer."""
    kind, other = (nn.Linear, PromptLinear) if does else (PromptLinear, nn.Linear)
    for module in model.modules() if faster() else ():
        if type(module) is kind:
            module.__class__ = other


@cache
def faster() -> bool:
    """Whether MKL leaves half of this processor's registers unused: one of AMD's, with AVX-512."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        from llvmlite.binding import get_host_cpu_name
    except ImportError:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and get_host_cpu_name().startswith("znver")


def _many(x: Tensor) -> bool:
    return x.numel() >= LEAST * x.shape[-1]


def _suit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN is given these: fp32 on a CPU, nobody wants gradients, a graph or other dtypes."""
    given = [one for one in (x, weight, bias) if one is not None]
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return False
    return all(one.dtype == torch.float32 and one.device.type == "cpu" for one in given) and x.numel() > 0
