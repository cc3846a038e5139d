"""Prompts: linear layers on many rows by oneDNN, where torch's library leaves half of a core idle.

torch's products of fp32 matrices on an x86 processor are MKL's, and MKL uses registers of 512 bits on Intel's
alone. oneDNN, which torch carries too, uses them on AMD's as well: 128 rows with a weight of 1,536 × 576 came
to 199 GFLOP/s where MKL did 102 (one thread of an AMD EPYC with AVX-512), its copies into oneDNN's layout and
out of it counted. Both round sums of fp32 products, in another order: 1e-6 of the largest apart.
While a call lasts it holds copies of its weight, and none outlives it. oneDNN and torch do keep something for
each shape of a product, some .4 MB: so rows come in multiples of `ROUND`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

LEAST, MORE = 64, 128  # rows from which copying takes less than is gained; of very small and large weights
SMALL, LARGE = 2**17, 2**23  # numbers of a weight between which `LEAST` holds
NONE = 2**15  # numbers of a weight up to which nothing is gained
ROUND = 32
BLOCK = 512  # rows at a time: what a block reads and writes stays in the processor's cache


class PromptLinear(nn.Linear):
    """`nn.Linear`, the same parameters, faster on many rows. Tools that look for the class `nn.Linear` itself
    (torch's quantization) overlook it: give them the eager model."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of x `[.., in]` and weight `[out, in]`: `[.., out]`, by oneDNN where that is faster."""
    if not torch.compiler.is_compiling() and faster() and _suit(x, weight, bias):
        with suppress(RuntimeError):  # a kind of tensor that it does not take: `linear` does, or says why not
            return _by_onednn(x, weight, bias)
    return linear(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    given = weight.to_mkldnn(), None if bias is None else bias.to_mkldnn()
    out = x.new_empty(len(rows), len(weight))
    for into, some in zip(out.split(BLOCK), rows.split(BLOCK), strict=True):
        some = pad(some, (0, 0, 0, -len(some) % ROUND))
        into.copy_(linear(some.to_mkldnn(), *given).to_dense()[: len(into)])
    return out.view(*x.shape[:-1], len(weight))


def by_blocks(model, does: bool = True) -> None:
    """Let the model's linear layers use it, if it is faster on this machine, or stop using it."""
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


def _suit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN is given these: many rows of fp32 on a CPU, without gradients or other dtypes."""
    size = weight.numel()
    least = LEAST if SMALL <= size <= LARGE else MORE
    if size <= NONE or x.numel() < least * x.shape[-1] or torch.is_autocast_enabled("cpu"):
        return False
    given = [one for one in (x, weight, bias) if one is not None]
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return False
    return all(one.dtype == torch.float32 and one.device.type == "cpu" for one in given)
