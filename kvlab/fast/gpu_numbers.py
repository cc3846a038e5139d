"""Codes become numbers in registers of a GPU, exactly: in Triton, and for bf16 in a few lines of PTX.

A word holds four codes of a token: four bytes of int8 or of an 8-bit float, two of int4, one of int2. In bf16
the bits 0x4300 + n are the number 128 + n, n below 128, and in fp16 0x6400 + n are 1024 + n, n below 1024: to
set bits and to subtract makes a number of a code. The bits of an 8-bit float move to where the wider one has
its exponent and fraction; a power of two does the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..store import Exact, Float8, Int

# The interpreter cannot multiply bf16, nor round to it.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
GROUPS = 16  # scales of a token at most
WORDS = {"int8": 4, "e4m3": 4, "e5m2": 4, "int4": 2, "int2": 1}  # bytes of a word, of four codes
FACTORS = {  # bf16 bits: what is multiplied by, and added
    "int8": (0xBF80, 0), "int4": (0x3F80, 0xC308), "int2": (0x3F80, 0xC302),  # -1; 1, -136; 1, -130
    "e4m3": (0x7B80, 0x8000), "e5m2": (0x7780, 0x8000),  # 2^120, -0; 2^112, -0
}  # fmt: skip


def _twice(bits: int) -> str:
    return f"{bits * 0x10001:#010x}"


def _ptx(form: str) -> str:
    """Two bf16 numbers in every register, of neighbouring elements. Results come first (`$0`, ...), then two
    words of four bytes, or one register with two words of two, or four of one."""
    lines = [".reg .b32 m, n, a, b, c, d;"]
    lines += [f"mov.b32 {name}, {_twice(bits)};" for name, bits in zip("bd", FACTORS[form], strict=True)]
    if WORDS[form] == 4:  # the same bytes of two words, side by side
        lines += ["prmt.b32 m, $4, $5, 0x5140;", "prmt.b32 n, $4, $5, 0x7362;"]
    for part in range(4):
        pair, odd = "mn"[part // 2], part % 2
        if form == "int8":  # 128 + the lower seven bits, minus 128, or 256 where the sign is set
            lines += [
                f"prmt.b32 a, {pair}, 0x43434343, {(0x4140, 0x4342)[odd]:#x};",
                f"and.b32 c, a, {_twice(0xFF80)};",
                f"and.b32 a, a, {_twice(0xFF7F)};",
                f"fma.rn.bf16x2 ${part}, c, b, a;",
            ]
        elif form in ("e4m3", "e5m2"):  # the sign stays
            places, moved = (4, 0x07F0) if form == "e4m3" else (3, 0x0FE0)
            lines += [
                f"prmt.b32 a, {pair}, 0, {(0x1404, 0x3424)[odd]:#x};",
                f"shr.u32 c, a, {places};",
                f"and.b32 c, c, {_twice(moved)};",
                f"lop3.b32 a, a, {_twice(0x8000)}, c, 0xea;",  # a & ... | c
                f"fma.rn.bf16x2 ${part}, a, b, d;",
            ]
        elif form == "int4":
            lines += [
                f"shr.u32 a, $4, {8 * odd + 4 * (part // 2)};",
                f"lop3.b32 a, a, {_twice(0x000F)}, {_twice(0x4300)}, 0xea;",
                f"fma.rn.bf16x2 ${part}, a, b, d;",
            ]
        else:
            lines += [f"shr.u32 a, $8, {2 * part};", "and.b32 a, a, 0x03030303;"]
            lines += ["prmt.b32 c, a, 0x43434343, 0x4140;", "prmt.b32 a, a, 0x43434343, 0x4342;"]
            lines += [f"fma.rn.bf16x2 ${2 * part + at}, {half}, b, d;" for at, half in enumerate("ca")]
    return "{\n" + "\n".join(lines) + "\n}"


PTX = {form: _ptx(form) for form in WORDS}
INT8, INT4, INT2, E4M3, E5M2 = (tl.constexpr(PTX[form]) for form in ("int8", "int4", "int2", "e4m3", "e5m2"))
FOUR = tl.constexpr((tl.bfloat16,) * 4)


@triton.jit
def _number(words, PART: tl.constexpr, FORM: tl.constexpr):
    """One code of every word as an fp16 number."""
    if FORM == "int4":
        bits = (words.to(tl.int32) >> (8 * (PART % 2) + 4 * (PART // 2))) & 15
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    elif FORM == "int2":
        bits = (words.to(tl.int32) >> (2 * PART)) & 3
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1026.0
    elif FORM == "int8":
        bits = ((words >> (8 * PART)) & 255) ^ 128
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    else:
        bits = (words >> (8 * PART)) & 255
        if FORM == "e5m2":
            return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            bits = ((bits & 128) << 8) | ((bits & 127) << 7)
            return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def numbers(words, FORM: tl.constexpr, DOT: tl.constexpr):
    """Words -> numbers of dtype DOT, a tuple: the first of every word, and so on."""
    if FORM == "exact":
        return (words.to(DOT),)
    elif tl.bfloat16 != DOT:
        return (
            _number(words, 0, FORM).to(DOT),
            _number(words, 1, FORM).to(DOT),
            _number(words, 2, FORM).to(DOT),
            _number(words, 3, FORM).to(DOT),
        )
    elif FORM == "int8":
        return tl.inline_asm_elementwise(INT8, "=r,=r,=r,=r,r,r", [words], FOUR, True, 2)
    elif FORM == "e4m3":
        return tl.inline_asm_elementwise(E4M3, "=r,=r,=r,=r,r,r", [words], FOUR, True, 2)
    elif FORM == "e5m2":
        return tl.inline_asm_elementwise(E5M2, "=r,=r,=r,=r,r,r", [words], FOUR, True, 2)
    elif FORM == "int4":
        return tl.inline_asm_elementwise(INT4, "=r,=r,=r,=r,r", [words], FOUR, True, 2)
    else:
        return tl.inline_asm_elementwise(INT2, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words], FOUR, True, 4)


def kind_of(form) -> str | None:
    """What kernels call a format's numbers; None: they do not know them."""
    if isinstance(form, Int):
        return f"int{form.bits}" if form.bits in (2, 4, 8) else None
    if isinstance(form, Float8):
        return form.format
    return "exact" if type(form) is Exact else None


def supports(form, head_dim: int) -> bool:
    """Whether kernels read a format: plain numbers, symmetric integers of 2, 4 or 8 bits, or 8-bit floats;
    scales belong to single tokens. Head dimensions are multiples of 16, up to 256."""
    if head_dim % 16 or head_dim > 256 or kind_of(form) is None:
        return False
    if (scales := getattr(form, "scales", None)) is None:
        return True
    group = scales.group or head_dim
    few = head_dim % group == 0 and head_dim // group <= GROUPS
    return few and not scales.fixed and getattr(form, "symmetric", True)
