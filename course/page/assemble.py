"""Assemble: WebAssembly's text form to its binary form, as much of it as `kernel.wat` uses.

One module, one imported memory, exported functions without results whose bodies are flat lists of
instructions with loops. The encoding is the WebAssembly core specification's, sections 5 and 6.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

TYPES = {"i32": 0x7F, "f32": 0x7D, "v128": 0x7B}
PLAIN = {  # instructions without an operand
    "end": 0x0B, "i32.lt_u": 0x49, "i32.add": 0x6A, "i32.sub": 0x6B, "i32.mul": 0x6C, "f32.add": 0x92,
    "f32.mul": 0x94,
}  # fmt: skip
SIMD = {  # after the prefix 0xFD
    "i32x4.extend_low_i16x8_s": 167, "i32x4.extend_high_i16x8_s": 168, "f32x4.add": 228, "f32x4.mul": 230,
    "f32x4.convert_i32x4_s": 250,
}  # fmt: skip
LOCALS = {"local.get": 0x20, "local.set": 0x21, "local.tee": 0x22}
MEMORY = {  # (opcode, alignment as a power of two)
    "f32.load": (b"\x2a", 2), "f32.store": (b"\x38", 2), "v128.load": (b"\xfd\x00", 2),
    "v128.load8x8_s": (b"\xfd\x01", 0),
}  # fmt: skip


def assemble(text: str) -> bytes:
    """The binary module. ValueError for an instruction that is not known here."""
    _, *parts = parsed(text)
    module, functions = {part[0]: part for part in parts}, [part for part in parts if part[0] == "func"]
    _, place, name, (_, pages) = module["import"]
    types, exports, codes = [], [], []
    for index, (_, (_, exported), *rest) in enumerate(functions):
        given = [part[1:] for part in rest if part[0] == "param"]
        own = [part[1:] for part in rest if part[0] == "local"]
        types.append(b"\x60" + vector([bytes([TYPES[kind]]) for _, kind in given]) + b"\x00")
        exports.append(string(exported) + b"\x00" + whole(index))
        numbers = {name: index for index, (name, _) in enumerate([*given, *own])}
        held = vector([b"\x01" + bytes([TYPES[kind]]) for _, kind in own])
        words = [part for part in rest if isinstance(part, str)]
        code = held + b"".join(instructions(words, numbers)) + b"\x0b"
        codes.append(whole(len(code)) + code)
    memory = string(place) + string(name) + b"\x02\x00" + whole(int(pages))
    uses = [whole(index) for index in range(len(functions))]
    sections = ((1, types), (2, [memory]), (3, uses), (7, exports), (10, codes))
    return b"\x00asm\x01\x00\x00\x00" + b"".join(section(*given) for given in sections)


def parsed(text: str) -> list:
    """The text's first expression as nested lists of words; strings lose their quotes."""
    stack: list[list] = [[]]
    for word in re.findall(r'[()]|"[^"]*"|[^\s()"]+', re.sub(r";;.*", "", text)):
        if word == "(":
            stack.append([])
        elif word == ")":
            stack[-2].append(stack.pop())
        else:
            stack[-1].append(word.strip('"'))
    return stack[0][0]


def instructions(words: list[str], numbers: dict[str, int]) -> Iterator[bytes]:
    """A body's instructions, encoded. numbers: of the parameters and locals, by name."""
    coming, labels = iter(words), []
    waiting = next(coming, None)
    while (word := waiting) is not None:
        waiting = next(coming, None)
        taken: list[str] = []
        count = {"v128.const": 5}.get(word, 1 if _takes_operand(word, waiting) else 0)
        for _ in range(count):
            taken.append(waiting)
            waiting = next(coming, None)
        yield _encoded(word, taken, numbers, labels)


def _takes_operand(word: str, following: str | None) -> bool:
    if word in MEMORY:
        return (following or "").startswith("offset=")
    return word in LOCALS or word in ("i32.const", "f32x4.extract_lane", "loop", "br_if")


def _encoded(word: str, taken: list[str], numbers: dict[str, int], labels: list[str]) -> bytes:
    if word == "loop":
        labels.append(taken[0])
        return b"\x03\x40"
    if word == "end":
        labels.pop()
    if word == "br_if":
        return b"\x0d" + whole(labels[::-1].index(taken[0]))
    if word in LOCALS:
        return bytes([LOCALS[word]]) + whole(numbers[taken[0]])
    if word in MEMORY:
        code, alignment = MEMORY[word]
        return code + whole(alignment) + whole(int(taken[0].removeprefix("offset=")) if taken else 0)
    if word == "i32.const":
        return b"\x41" + signed(int(taken[0]))
    if word == "v128.const":
        return b"\xfd" + whole(12) + struct.pack("<4i", *map(int, taken[1:]))
    if word == "f32x4.extract_lane":
        return b"\xfd" + whole(31) + whole(int(taken[0]))
    if word in SIMD:
        return b"\xfd" + whole(SIMD[word])
    if word in PLAIN:
        return bytes([PLAIN[word]])
    raise ValueError(f"{word}: not among the instructions that course/page/assemble.py knows")


def section(number: int, items: list[bytes]) -> bytes:
    body = vector(items)
    return bytes([number]) + whole(len(body)) + body


def vector(items: list[bytes]) -> bytes:
    return whole(len(items)) + b"".join(items)


def string(text: str) -> bytes:
    return whole(len(text.encode())) + text.encode()


def whole(number: int) -> bytes:
    """LEB128, without a sign."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def signed(number: int) -> bytes:
    """LEB128, with a sign."""
    out = bytearray()
    while not -64 <= number < 64:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number & 0x7F])
