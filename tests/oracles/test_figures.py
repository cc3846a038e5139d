"""Every figure that the source texts print and that arithmetic can make, to its digit; else, the difference.

The texts are named as in docs/sources.md.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch

from kvlab.arithmetic import (
    MACHINES,
    SHAPES,
    TIERS,
    batch_that_fits,
    decode_flops,
    kv_bytes,
    kv_bytes_per_token,
    kv_share,
    kv_to_weights,
    padded_buffer_bytes,
    prefill_flops,
    required_bandwidth,
    throughput,
    weight_bytes,
)
from kvlab.keep import H2O
from kvlab.models import ModelShape


def prints(value: float, printed: str) -> bool:
    """Rounded to as many decimals as were printed, is it what was printed?"""
    decimals = len(printed.partition(".")[2])
    return f"{value:.{decimals}f}" == printed


def bus_bandwidth(bits: int, transfers: float) -> float:
    """Bytes per second of a bus `bits` wide that moves so many times per second."""
    return bits / 8 * transfers


def tokens_that_fit(shape: ModelShape, size: float) -> int:
    """Tokens whose 16-bit cache fits into `size` bytes, over all rows together."""
    return int(size // kv_bytes_per_token(shape))


# QC AI Research (n.d.)


def test_padded_buffers_of_llama_7b():
    llama = SHAPES["Llama-7B"]
    assert padded_buffer_bytes(llama, 2048, factor=2) == 2_146_435_072
    assert padded_buffer_bytes(llama, 2048, factor=1.5) == 1_609_826_304
    # Erratum: "(S - 1)/2" more rows are no whole number for an even S; half a row of each sequence is meant.
    assert 2047 % 2 == 1 and 1.5 * 2047 != int(1.5 * 2047)


# Gong, Yi and Zhang (2024)


def test_a_token_of_opt_30b():
    opt = SHAPES["OPT-30B"]
    assert kv_bytes_per_token(opt) == 1_376_256
    assert prints(math.floor(kv_bytes_per_token(opt) / 2**20 * 10) / 10, "1.3")  # 1.3125 MiB, cut off
    wrong = ModelShape(48, 7198, 1, 1)  # erratum: the hidden size is 7168, as their own table has it
    assert prints(kv_bytes_per_token(wrong) / 2**20, "1.3") and kv_bytes_per_token(wrong) == 1_382_016
    # "40.6 GB" is 32,000 tokens of the rounded 1.3 MB at 1,024 MB to the GB.
    assert prints(math.floor(1.3 * 32_000 / 1024 * 10) / 10, "40.6")
    assert prints(kv_bytes(opt, 32_000) / 2**30, "41.0") and prints(kv_bytes(opt, 32_768) / 2**30, "42.0")


LONGCHAT = {  # thousands of tokens: ms of prefill and of a decode step, size, bandwidths they require
    1: ("172.59", "27.99", "0.50", "2.92", "17.99"),
    2: ("327.27", "30.73", "0.99", "3.03", "32.27"),
    4: ("670.07", "36.05", "1.97", "2.94", "54.60"),
    8: ("1343.27", "46.91", "3.92", "2.92", "83.60"),
    16: ("3026.89", "68.35", "7.83", "2.59", "114.52"),
    32: ("7640.90", "112.46", "15.64", "2.05", "139.08"),
}


def allows(size: float, ms: str, printed: str) -> bool:
    """Is there a time that is printed as `ms` and gives the printed bandwidth?"""
    slow, quick = (required_bandwidth(size, (float(ms) + half) / 1e3) for half in (0.005, -0.005))
    return slow <= float(printed) + 0.005 and quick >= float(printed) - 0.005


@pytest.mark.parametrize("thousands", LONGCHAT)
def test_bandwidth_that_longchat_requires(thousands):
    """Erratum: the sizes, printed GB, are GiB, of 1,000 K + 31 tokens."""
    prefill, decode, size, over_prefill, over_decode = LONGCHAT[thousands]
    found = kv_bytes(SHAPES["Longchat-7B"], 1000 * thousands + 31) / 2**30
    assert prints(found, size)
    assert prints(required_bandwidth(found, float(prefill) / 1e3), over_prefill)
    assert allows(found, decode, over_decode)
    if thousands not in (8, 32):  # 83.594 and 139.073: the times have lost what makes the last digit
        assert prints(required_bandwidth(found, float(decode) / 1e3), over_decode)
    else:
        assert abs(required_bandwidth(found, float(decode) / 1e3) - float(over_decode)) < 0.0075
    ends = (float(decode) + away for away in (0, 0.005, -0.005))
    exact, least, most = (required_bandwidth(found, ms / 1e3) for ms in ends)
    row = f"| {thousands}K | {decode} | {over_decode} | {exact:.2f} | {least:.3f} to {most:.3f} |"
    page = Path(__file__).resolve().parents[2] / "docs" / "offloading.md"
    assert row in page.read_text(encoding="utf-8")


def test_a_tenth_of_longchats_cache_fits_through_pcie():
    needed = [float(row[4]) for row in LONGCHAT.values()]
    assert [value > 28 for value in needed] == [False, True, True, True, True, True]
    assert max(needed) * 0.1 < 28


def test_compression_ratios_and_links():
    shape = SHAPES["OPT-13B"]
    assert kv_bytes(shape, 2048) / kv_bytes(shape, 2048, bits=4) == 4  # INT4, its scales left out
    assert 1 / H2O().budget == 5
    assert MACHINES["A6000-PCIe3"].link == 16e9 and MACHINES["A100-PCIe4"].link == 28e9


# allenlu2009 (2023)


@pytest.mark.parametrize(
    "name, layers, hidden, heads",
    [("Llama-2-7B", 32, 4096, 32), ("Llama-2-13B", 40, 5120, 40), ("Llama-33B", 60, 6656, 52),
     ("Llama-2-70B", 80, 8192, 64), ("GPT-3", 96, 12288, 96)],
)  # fmt: skip
def test_printed_shapes(name, layers, hidden, heads):
    """Erratum: 33B is a model of the first Llama, not of Llama 2."""
    shape = SHAPES[name]
    assert (shape.layers, shape.hidden, shape.heads) == (layers, hidden, heads)


def test_caches_of_gpt_3():
    gpt3 = SHAPES["GPT-3"]
    assert prints(kv_bytes(gpt3, 100) / 1e6, "472")
    assert prints(kv_bytes(gpt3, 512 + 32, batch=64) / 1e9, "164")
    assert prints(kv_bytes(gpt3, 2048) / 1e9, "9.7")
    assert prints(weight_bytes(gpt3, bits=8) / 1e9, "175")
    # 16-bit cache, 8-bit weights: twice b(s + n) / 6h.
    assert prints(200 * kv_to_weights(gpt3, 2048), "5.6")
    assert prints(2 * kv_to_weights(gpt3, 512 + 32, batch=64), "1")  # "about 1 time"


def test_caches_of_llama_2_7b():
    llama = SHAPES["Llama-2-7B"]
    assert kv_bytes(llama, 2048) == 2**30  # "about 1 GB"
    assert prints(kv_bytes(llama, 4096) / 1e9, "2.1")
    assert prints(100 * kv_bytes(llama, 2048) / 7e9, "15")
    assert prints(100 * kv_bytes(llama, 4096) / 7e9, "31")
    # Erratum: "INT8: 7B x 2 = 7 GB"; 7e9 parameters in 8 bits are 7 GB, in 4 bits half of it.
    assert prints(weight_bytes(llama, bits=8) / 1e9, "7") and 7e9 * 4 / 8 == 3.5e9
    # Beside weights of 4 bits the shares double.
    shares = [100 * kv_bytes(llama, tokens) / 3.5e9 for tokens in (2048, 4096)]
    assert prints(shares[0], "31") and prints(shares[1], "61")


@pytest.mark.parametrize(
    "name, printed, right",
    [("Llama-2-7B", "7", True), ("Llama-2-13B", "13", True), ("Llama-33B", "33", False),
     ("Llama-2-70B", "70", False), ("GPT-3", "175", True)],
)  # fmt: skip
def test_parameters_by_12_l_h_squared(name, printed, right):
    """Erratum: 12 l h^2 is for an MLP of width 4h; Llama's is gated, and with GQA the count is another."""
    assert prints(weight_bytes(SHAPES[name], bits=8) / 1e9, printed) is right


def test_allenlu2009s_flops_of_a_decode_step():
    """24bh^2 + 4bh + 4b(kv_length)h a layer and 2bhV: right. (Its products carry a factor s too many, and the
    pass without a cache a factor h.)"""
    b, h, past, layers, vocabulary = 3, 64, 24, 2, 90
    shape = ModelShape(layers, h, 4, 4, vocabulary)
    printed = layers * (24 * b * h**2 + 4 * b * h + 4 * b * past * h) + 2 * b * h * vocabulary
    assert decode_flops(shape, past + 1, batch=b) == printed


def test_a_step_without_a_cache():
    """Erratum: 2 x parameters is what one token takes; without a cache a step feeds s of them."""
    llama, s = SHAPES["Llama-2-7B"], 128
    once = 2 * weight_bytes(llama, bits=8)
    assert decode_flops(llama, s) == pytest.approx(once, rel=0.03)
    assert prefill_flops(llama, s) == pytest.approx(once * s, rel=0.03)


def test_memory_tiers():
    """Errata: the smartphone's LP5-8500 of 64 bits gives 68 GB/s (printed 50, which is LPDDR5-6400), and its
    flash holds 512 GB, not TB. What the A100's 108 multiprocessors at 1.41 GHz multiply to is as printed.
    An RTX 4070 Ti has four tensor cores in each multiprocessor of 128 shaders: 240, printed 184."""
    a100, phone, rtx = TIERS["A100"], TIERS["smartphone"], TIERS["RTX 4070 Ti"]
    printed = [(20e6, 19e12), (40e9, 1.5e12), (1e12, 12.8e9)]
    assert [(one.size, one.bandwidth) for one in a100.values()] == printed
    assert math.floor(108 * 192 * 1024 / 1e6) == 21  # MB, printed 20: MiB, and 20.25 of them
    assert math.floor(108 * 128 * 1.41e9 / 1e12) == 19  # TB/s: 128 bytes per clock each
    assert prints(108 * 4 * 256 * 2 * 1.41e9 / 1e12, "312")  # fp16 TFLOP/s: four tensor cores each, 256 FMA
    assert prints(bus_bandwidth(64, 1.6e9) / 1e9, "12.8") and a100["host DRAM"].bandwidth == 12.8e9
    assert bus_bandwidth(64, 8.5e9) == phone["LPDDR5"].bandwidth == 68e9
    assert prints(bus_bandwidth(64, 6.4e9) / 1e9, "51")
    assert prints(bus_bandwidth(192, 21e9) / 1e9, "504") and rtx["GDDR6X"].bandwidth == 504e9
    assert prints(7680 * 2 * 2.61e9 / 1e12, "40")  # its fp32 TFLOP/s
    assert 7680 // 128 * 4 == 240 and 5888 // 128 * 4 == 184  # the second are an RTX 4070's
    assert prints(240 * 128 * 2 * 2.61e9 / 1e12, "160")  # fp16 TFLOP/s of these: 128 FMA each


def test_what_training_keeps():
    """Erratum: 34blsh + 11bls²a is printed; Korthikanti et al. (2022) have 5 in the place of 11."""
    llama, s = SHAPES["Llama-2-7B"], 4096
    linear, square = 34 * s * llama.hidden, (2 + 1 + 2) * s**2 * llama.heads  # bytes of a layer
    assert prints(llama.layers * (linear + square) / 1e9, "104")
    assert kv_bytes(llama, s) == llama.layers * linear * 4 / 34


def test_where_a_cache_fits():
    """On the chip there is room for 38 tokens of Llama-2-7B: a step reads its cache from further away."""
    llama = SHAPES["Llama-2-7B"]
    assert tokens_that_fit(llama, TIERS["A100"]["SRAM"].size) == 38
    read = {name: 1e3 * kv_bytes(llama, 4096) / one.bandwidth for name, one in TIERS["A100"].items()}
    assert prints(read["HBM"], "1.4") and prints(read["host DRAM"], "168")  # ms
    assert prints(1e3 * kv_bytes(llama, 4096) / TIERS["smartphone"]["LPDDR5"].bandwidth, "32")


# KV Cache (n.d.)


def test_the_steps_of_a_prefill():
    """Erratum: the output projection of s tokens is 2bsh^2, printed 2bh^2; their total has it right."""
    b, s, h, vocabulary = 2, 24, 64, 90
    steps = [6 * b * s * h**2, 2 * b * s**2 * h, 2 * b * s**2 * h, 2 * b * s * h**2, *[8 * b * s * h**2] * 2]
    head, shape = 2 * b * s * h * vocabulary, ModelShape(3, h, 4, 4, vocabulary)
    assert prefill_flops(shape, s, batch=b) == 3 * sum(steps) + head
    as_printed = sum(steps) - 2 * b * s * h**2 + 2 * b * h**2
    assert as_printed != sum(steps)


def test_the_printed_decode_formula_drops_factors_of_h():
    """Erratum: 4bKV_Length has lost an h, and 2bhVh (in the text, not in the conclusion) has one too many."""
    b, h, past, layers, vocabulary = 2, 64, 24, 3, 90
    shape = ModelShape(layers, h, 4, 4, vocabulary)
    right = decode_flops(shape, past + 1, batch=b)
    conclusion = layers * (24 * b * h**2 + 4 * b * h + 4 * b * past) + 2 * b * h * vocabulary
    assert right - conclusion == layers * 4 * b * past * (h - 1)
    text = layers * (24 * b * h**2 + 4 * b * h + 4 * b * past) + 2 * b * h * vocabulary * h
    assert text - conclusion == 2 * b * h * vocabulary * (h - 1)


# 8-bit KV Cache (2024)


def test_llama_70b_in_two_devices_of_80_gb():
    llama = SHAPES["Llama-70B-MHA"]
    assert kv_bytes_per_token(llama) == 2_621_440
    assert prints(kv_bytes_per_token(llama) / 1e9, "0.0026")
    assert 70e9 * 2 == 140e9 and 2 * 80 - 140 == 20  # erratum: printed 70e12 * 2 = 140e12 bytes
    # The text divides by the rounded 0.0026 GB; either way a batch of 3 requests of 2,048 tokens.
    assert int(20 / 0.0026) == 7692
    assert tokens_that_fit(llama, 20e9) == 7629
    assert 7692 // 2048 == tokens_that_fit(llama, 20e9) // 2048 == 3
    # Erratum: it assumes 64 KV heads. The model has 8, an eighth of the cache.
    real = SHAPES["Llama-2-70B"]
    assert kv_bytes_per_token(real) * 8 == 2_621_440
    assert tokens_that_fit(real, 20e9) // 2048 == 29


def test_eight_bits_halve_the_cache():
    llama = SHAPES["Llama-70B-MHA"]
    assert kv_bytes(llama, 2048, bits=8) * 2 == kv_bytes(llama, 2048)


def test_shares_of_device_memory():
    """84 % of the DRAM (7B) and 50 % (175B) are printed without a device or a batch. 84 % is what the weights
    leave of 80 GB. 50 % is a cache as large as the weights: 6h tokens over all rows."""
    assert prints(100 * (1 - weight_bytes(SHAPES["Llama-7B"]) / 80e9), "84")
    gpt3 = SHAPES["GPT-3"]
    assert kv_to_weights(gpt3, 6 * gpt3.hidden) == 1 and 6 * gpt3.hidden == 73_728
    assert prints(100 * (1 - weight_bytes(gpt3) / (8 * 80e9)), "45")  # of eight such devices
    # Beside 16-bit weights it is also what 64 rows of 2,048 tokens take: 131,072 tokens.
    assert prints(100 * kv_share(SHAPES["Llama-7B"], 2048, batch=64), "84")
    assert kv_share(gpt3, 6 * gpt3.hidden) == pytest.approx(0.5, abs=0.001)


def test_throughput_against_the_batch_to_the_end_of_memory():
    """A smaller cache allows a larger batch, and that improves the ratio of computation to memory: half the
    bits, twice the rows, and twice the tokens per second, on 80 GB."""
    llama, machine = SHAPES["Llama-7B"], MACHINES["A100-PCIe4"]
    most = {bits: batch_that_fits(llama, 80e9, 2048, bits) for bits in (16, 8, 4)}
    assert most == {16: 62, 8: 124, 4: 249}
    at_the_end = {bits: throughput(machine, llama, 2048, rows, bits) for bits, rows in most.items()}
    assert at_the_end[8] / at_the_end[16] == pytest.approx(2, abs=0.01)
    assert [round(value) for value in at_the_end.values()] == [1505, 3010, 6024]
    # More rows gain ever less: where the cache is read alone, its bytes are the limit.
    limit = machine.memory / kv_bytes(llama, 2048)
    curve = [throughput(machine, llama, 2048, rows) for rows in range(1, 63)]
    gains = [later - one for one, later in itertools.pairwise(curve)]
    assert all(0 < later < one for one, later in itertools.pairwise(gains))
    assert 0.8 * limit < curve[-1] < limit
    # It ends at 84 % for every width, since the cache fills what the weights leave.
    assert all(prints(100 * kv_share(llama, 2048, rows, bits), "84") for bits, rows in most.items())
    assert batch_that_fits(SHAPES["Llama-70B-MHA"], 80e9, 2048) == 0  # the weights alone do not fit


def test_llama_70b_and_the_operations_of_a_token():
    """140e9 is right twice: 2 bytes, and 2 operations, for each of 70e9 parameters. 70e12 is neither."""
    llama = SHAPES["Llama-2-70B"]
    assert 2 * 70e9 == 140e9
    assert decode_flops(llama, 1) == pytest.approx(2 * weight_bytes(llama, bits=8), rel=1e-3)


def test_the_printed_wrapper_counts_the_whole_storage():
    """*8-bit KV Cache* (2024): for x[::2] it stores all that the storage holds, into half the room."""
    x = torch.zeros(1024, dtype=torch.float16)[::2]
    assert x.untyped_storage().size() // x.element_size() == 2 * torch.empty_like(x).numel()
    assert [block // 32 // 4 for block in (128, 512)] == [1, 4]  # warps of 32 threads, four numbers each
