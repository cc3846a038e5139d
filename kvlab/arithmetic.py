"""Arithmetic of the KV cache: bytes, floating-point operations, bandwidth. Every formula of the course.

Symbols: b batch, s prompt length, n generated tokens, h hidden size, l layers, n_kv KV heads, d head
dimension, V vocabulary. Bytes are bytes; GB is 1e9 bytes, GiB 2**30.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from .models.shape import ModelShape

# Published shapes that the source documents compute with (vocabularies from the model cards).
SHAPES = {
    "GPT-3": ModelShape(96, 12288, 96, 96, 50257),
    "OPT-6.7B": ModelShape(32, 4096, 32, 32, 50272),
    "OPT-13B": ModelShape(40, 5120, 40, 40, 50272),
    "OPT-30B": ModelShape(48, 7168, 56, 56, 50272),
    "Llama-7B": ModelShape(32, 4096, 32, 32, 32000),
    "Llama-2-7B": ModelShape(32, 4096, 32, 32, 32000),
    "Longchat-7B": ModelShape(32, 4096, 32, 32, 32000),
    "Llama-2-13B": ModelShape(40, 5120, 40, 40, 32000),
    "Llama-33B": ModelShape(60, 6656, 52, 52, 32000),
    "Llama-70B-MHA": ModelShape(80, 8192, 64, 64, 32000),  # as in *8-bit KV Cache* (2024)
    "Llama-2-70B": ModelShape(80, 8192, 64, 8, 32000),
}


@dataclass(frozen=True)
class Machine:
    """The numbers of a machine for a roofline and a link. All per second."""

    flops: float  # dense 16-bit operations of the device
    memory: float  # bytes the device reads from its own memory
    link: float  # bytes between host and device, one direction
    host_memory: float = 100e9  # bytes the host reads from its own memory


# NVIDIA's sheets; PCIe 3.0 and 4.0 as in Gong, Yi and Zhang 2024 (16, 28 GB/s), the rest as specified.
MACHINES = {
    "A6000-PCIe3": Machine(154.8e12, 768e9, 16e9),
    "A100-PCIe4": Machine(312e12, 1935e9, 28e9),
    "H100-PCIe5": Machine(756e12, 2000e9, 64e9),
    "GH200-C2C": Machine(990e12, 4000e9, 450e9),
}


@dataclass(frozen=True)
class Tier:
    """One memory of a machine: how many bytes it holds, and how many it gives per second."""

    size: float
    bandwidth: float


# As allenlu2009 (2023) lists them (A100 after Dao et al. 2022, figure 1), with two slips corrected: eight
# bytes at 8.5 GT/s are 68 GB/s, printed 50; the flash holds 512 GB, printed TB. Gaps there are left out here.
TIERS = {
    "A100": {"SRAM": Tier(20e6, 19e12), "HBM": Tier(40e9, 1.5e12), "host DRAM": Tier(1e12, 12.8e9)},
    "smartphone": {"LPDDR5": Tier(12e9, 68e9), "flash": Tier(512e9, 1e9)},
    "RTX 4070 Ti": {"GDDR6X": Tier(12e9, 504e9)},
}


LAUNCHES = 50e-6  # seconds to launch the kernels of a layer: about ten, 5 microseconds each


def layer_seconds(machine: Machine, shape: ModelShape, held: int, batch: int = 1) -> float:
    """A roofline for one layer of a decode step in 16 bits, everything on the device: the longest of its
    operations, 24bh^2 + 4b held h; its bytes, 24h^2 of weights and the K and V of `held` tokens; and the
    launches of its kernels."""
    h = shape.hidden
    operations = 24 * batch * h**2 + 4 * batch * held * h
    size = 24 * h**2 + kv_bytes(shape, held, batch) / shape.layers
    return max(operations / machine.flops, size / machine.memory, LAUNCHES)


def kv_bytes_per_token(shape: ModelShape, bits: float = 16) -> float:
    """2 (K and V) * l * n_kv * d * bits / 8."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * bits / 8


def latent_step(
    heads: int, rank: int, rotary: int, nope: int, value: int, tokens: int, bits: float = 16
) -> dict[str, tuple[float, float]]:
    """One layer of a decode step with multi-head latent attention (DeepSeek-V2, 2024, section 2.1), one row
    of `tokens` tokens held: {how: (bytes of the cache, operations)}, two for every multiply-add.

    rank and rotary: numbers cached per token; nope and value: of a head's key without its rotary part, and of
    its value. "multi-head": K and V of all heads are cached. "plain": they are computed from the latents at
    every step. "absorbed": never; the matrices are merged into the query and the output.
    """
    wide, made = nope + rotary + value, rank * (nope + value)
    both = tokens * (rank + rotary) * bits / 8
    return {
        "multi-head": (tokens * heads * wide * bits / 8, 2 * heads * tokens * wide),
        "plain": (both, 2 * heads * tokens * (wide + made)),
        "absorbed": (both, 2 * heads * (made + tokens * (2 * rank + rotary))),
    }


def kv_bytes(shape: ModelShape, tokens: int, batch: int = 1, bits: float = 16) -> float:
    """Bytes of the KV cache of `batch` rows of `tokens` tokens."""
    return batch * tokens * kv_bytes_per_token(shape, bits)


def padded_buffer_bytes(shape: ModelShape, length: int, factor: float = 2, bits: float = 16) -> float:
    """2 (K and V) * l * n_kv * factor * (S - 1) * d * bits / 8 (QC AI Research, n.d.).

    factor * (S - 1) rows are reserved for each K and V sequence: 1 for the window alone, 2 to copy nothing up
    to S tokens, 1 + extra between. When the n_kv heads share an allocation, factor is 1 + extra / n_kv.
    """
    return factor * (length - 1) * kv_bytes_per_token(shape, bits)


def padded_copied_bytes(
    shape: ModelShape, length: int, tokens: int, extra: float = 0, bits: float = 16, heads: int = 1
) -> float:
    """Bytes copied to append `tokens` tokens to windows of S - 1 rows (QC AI Research, n.d.).

    extra * (S - 1) spare rows let that many appends move a pointer; the next one copies the window back:
    tokens // (extra * (S - 1) + 1) copies of S - 1 rows for each of the 2 * l * n_kv sequences. extra 0 is a
    shift at every append, 1 the paper's doubled buffer. With `heads` > 1 in one allocation a copy moves
    heads * (S - 1) - 1 rows, and every append writes one row per head.
    """
    rows, copies = length - 1, tokens // (int(extra * (length - 1) + 1e-9) + 1)
    row_bytes = kv_bytes_per_token(shape, bits) / heads  # one row in each of the allocations
    if heads == 1:
        return copies * rows * row_bytes
    return (copies * (heads * rows - 1) + tokens * heads) * row_bytes


def kv_to_weights(shape: ModelShape, tokens: int, batch: int = 1) -> float:
    """Cache over weight bytes of the blocks at equal precision, b(s + n) / 6h (MHA; allenlu2009 2023)."""
    return batch * tokens / (6 * shape.hidden)


def weight_bytes(shape: ModelShape, bits: float = 16) -> float:
    """Bytes of the blocks' weights, l * 12h^2 * bits / 8 (MHA, MLP of width 4h), and of one embedding."""
    parameters = shape.layers * 12 * shape.hidden**2 + shape.vocabulary * shape.hidden
    return parameters * bits / 8


def step_bytes(shape: ModelShape, held: int, batch: int = 1, bits: float = 16) -> float:
    """Bytes that one decode step must read at least: all weights once, and every row's cache once."""
    return weight_bytes(shape, bits) + kv_bytes(shape, held, batch, bits)


def kv_share(shape: ModelShape, tokens: int, batch: int = 1, bits: float = 16) -> float:
    """The cache's share of the memory in use, with weights in 16 bits."""
    cache = kv_bytes(shape, tokens, batch, bits)
    return cache / (cache + weight_bytes(shape))


def batch_that_fits(shape: ModelShape, size: float, tokens: int, bits: float = 16) -> int:
    """Rows of `tokens` tokens whose cache fits into `size` bytes beside 16-bit weights; 0: none."""
    left = size - weight_bytes(shape)
    return max(0, int(left // kv_bytes(shape, tokens, bits=bits)))


def throughput(machine: Machine, shape: ModelShape, held: int, batch: int, bits: float = 16) -> float:
    """Tokens per second of a decode step at the roofline: batch over the longer of its bytes (weights in 16
    bits once, every row's cache of `held` tokens once) and its operations."""
    size = weight_bytes(shape) + kv_bytes(shape, held, batch, bits)
    return batch / max(size / machine.memory, decode_flops(shape, held, batch) / machine.flops)


def prefill_flops(shape: ModelShape, tokens: int, batch: int = 1) -> float:
    """l(24bsh^2 + 4bs^2h) + 2bshV for a pass over s tokens (full s x s attention, MHA; *KV Cache*, n.d.)."""
    b, s, h = batch, tokens, shape.hidden
    return shape.layers * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * shape.vocabulary


def decode_flops(shape: ModelShape, held: int, batch: int = 1) -> float:
    """One decode step that attends to `held` tokens, its own included: l(24bh^2 + 4b held h) + 2bhV
    (allenlu2009 2023; the formula of *KV Cache*, n.d., has lost a factor of h)."""
    b, h = batch, shape.hidden
    return shape.layers * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * shape.vocabulary


def causal_pairs(tokens: int, window: int | None = None) -> int:
    """Pairs of a query and a key it sees: s(s + 1) / 2, less (s - w)(s - w + 1) / 2 outside a window w."""
    outside = max(0, tokens - window) if window else 0
    return (tokens * (tokens + 1) - outside * (outside + 1)) // 2


def experts_read(experts: int, taken: int, rows: int) -> float:
    """Experts of a layer that a step of `rows` tokens reads, E(1 - (1 - k / E)^b), if each token takes k of E
    independently with equal chances."""
    return experts * (1 - (1 - taken / experts) ** rows)


def step_floor(machine: Machine, size: float, moved: float, operations: float) -> dict[str, float]:
    """The least seconds of a step, by each limit: bytes the device reads over its bandwidth, bytes moved over
    the link's, operations over FLOP/s. The longest is the floor."""
    return {
        "bandwidth": size / machine.memory,
        "link": moved / machine.link,
        "FLOP/s": operations / machine.flops,
    }


def cost_per_million(price: float, seconds: float, tokens: int) -> float:
    """Cost of a million tokens where `tokens` take `seconds`: price per hour * s / 3600 * 1e6 / n."""
    return price * seconds / 3600 * 1e6 / tokens


_kernel_flops = 0  # of all calls of our kernels so far


def count_flops(call) -> int:
    """FLOPs that `call()` executes, by torch's counter, attention over the full s x s included.

    Products of two matrices or of a matrix with a vector count, and attention, as two per multiply-add;
    norms, activations and softmax do not. FLOPs of our own kernels, which torch's counter does not know, are
    added (see `count_kernel`).
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    before, vectors = _kernel_flops, {torch.ops.aten.mv: _vector_flops}  # torch counts none
    # The fused attention of the CPU is unknown to the counter; in its plain form it is two products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=vectors) as counter:
        call()
    return counter.get_total_flops() + _kernel_flops - before


def _vector_flops(matrix, vector, *, out_shape=None, **_) -> int:
    """FLOPs of a product of a matrix of this shape with a vector."""
    return 2 * matrix[0] * matrix[1]


def count_kernel(flops: int) -> None:
    """Add the FLOPs of a kernel that torch's counter does not see."""
    global _kernel_flops
    _kernel_flops += flops


def required_bandwidth(bytes_moved: float, seconds: float) -> float:
    """Bytes per second a link must carry so that the transfer is no longer than the computation."""
    return bytes_moved / seconds


def read_bandwidth(seconds: float = 0.5, device: torch.device | str = "cpu") -> float:
    """Memory read bandwidth in bytes per second: the median of repeated sums over a large tensor.

    Runs for about `seconds` on the torch threads in force.
    """
    device = torch.device(device)
    size = 2**26 if device.type == "cpu" else 2**28  # 256 MiB or 1 GiB of fp32
    data = torch.ones(size, device=device)
    times: list[float] = []
    data.sum()
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        data.sum().item()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times)
