"""Codes become numbers: the PTX for bf16, run here by a few lines that know its six instructions."""

import numpy as np
import pytest
import torch
from with_triton import MARK

from kvlab.fast.gpu_numbers import PTX, WORDS
from kvlab.store import Float8, Int
from kvlab.store.planes import unpack

pytestmark = MARK
FORMS = {"int8": Int(8), "int4": Int(4), "int2": Int(2), "e4m3": Float8(), "e5m2": Float8("e5m2")}


def halves(register):
    """uint32 -> the two bf16 numbers in it, fp32 `[2, ...]`."""
    return np.stack([register << 16, register & 0xFFFF0000]).view(np.float32)


def joined(numbers):
    low, high = numbers.view(np.uint32)
    assert not ((low | high) & 0xFFFF).any(), "a bf16 number has eight bits"
    return low >> 16 | high


def run(ptx, given):
    """Registers `$n` and the named ones after all lines; given: those that are read."""
    held = dict(given)

    def value(word):
        return held[word] if word in held else np.array([int(word, 0)], np.uint32)

    for line in ptx.strip("{}\n ").splitlines():
        if line.startswith(".reg"):
            continue
        name, words = line.rstrip(";").split(" ", 1)
        into, *words = words.split(", ")
        read = [value(word) for word in words]
        if name == "mov.b32":
            held[into] = read[0]
        elif name == "and.b32":
            held[into] = read[0] & read[1]
        elif name == "shr.u32":
            held[into] = read[0] >> read[1]
        elif name == "lop3.b32":
            assert int(read[3][0]) == 0xEA
            held[into] = read[0] & read[1] | read[2]
        elif name == "prmt.b32":
            source = [read[at // 4] >> np.uint32(8 * (at % 4)) & 0xFF for at in range(8)]
            chosen = [source[int(read[2][0]) >> 4 * place & 7] for place in range(4)]
            held[into] = sum(byte << np.uint32(8 * place) for place, byte in enumerate(chosen)).astype(
                np.uint32
            )
        else:
            assert name == "fma.rn.bf16x2"
            a, b, c = (halves(register) for register in read)
            held[into] = joined((a * b + c).astype(np.float32))
    return held


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_becomes_its_number(form):
    """All bytes, at every place of a word, as neighbours of other bytes."""
    rng, size = np.random.default_rng(0), WORDS[form]
    words = np.stack([np.stack([rng.permutation(256) for _ in range(size)], -1) for _ in range(4)])
    words = words.astype(np.uint8)  # [neighbours, words, bytes]
    if form == "e4m3":
        words[words & 0x7F == 0x7F] = 0  # NaN
    if form == "e5m2":
        words[words & 0x7F > 0x7B] = 0
    together = 4 // size  # words in a register
    few = 2 if size > 1 else 4  # neighbours
    read = words[:few].transpose(1, 0, 2).reshape(256, few // together, 4)
    read = np.ascontiguousarray(read).view(np.uint32)[..., 0]
    results = 4 * few // 2
    held = run(PTX[form], {f"${results + at}": read[:, at] for at in range(few // together)})

    for part in range(4):
        outs = [halves(held[f"${part * few // 2 + at}"]) for at in range(few // 2)]
        found = np.concatenate(outs)  # [neighbours, words]
        for neighbour in range(few):
            packed = torch.from_numpy(words[neighbour].copy())
            if form == "int8":
                packed = packed.view(torch.int8)
            bits = getattr(FORMS[form], "bits", 8)
            wide = 8 // bits
            parts = torch.stack([unpack(packed[:, at : at + 1], bits) if form.startswith("int") else
                                 FORMS[form]._numbers(packed[:, at : at + 1], torch.float32)
                                 for at in range(size)])  # [bytes, words, codes of a byte]  # fmt: skip
            assert parts.shape[2] == wide
            wanted = parts[part % size, :, part // size].float().numpy()
            assert np.array_equal(found[neighbour], wanted), (part, neighbour)
