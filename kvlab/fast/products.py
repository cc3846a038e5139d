"""Queries times K and weights times V as products of bytes, where the processor has them (AVX-512 VNNI).

There one instruction multiplies 64 bytes by 64 others and adds each four products to one of 16 sums of 32
bits. So codes are multiplied as they lie, and what multiplies them becomes a whole number of 24 bits, in
three bytes: a query beside the largest of its channels, weights beside the largest of 512 tokens and a group
of channels. What is rounded off is 2^-24 of the largest, as in fp32. Codes of four tokens are brought side by
side in a register: for K, where a token's products are added up, four channels of each; for V one channel.

That is too little for most channels of a query with an outlier, where keys are 0: such queries are
multiplied as numbers (`lanes.even`). A weight has its token's scale in it, so one that holds attention and no
value is small.

`dots` and `add_up` are those of `lanes.py`, which says what they are given, and which runs then, on other
processors, for other codes, and where registers are too few for the sums of so many query heads and scales.
"""

# Compiled into this: fast/lanes.py 5ecc7181

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from . import lanes
from .lanes import FLOAT, INT, INT4, INT8, LANES, VECTOR, Code, _same, even, features

NEEDED = {"+avx512vnni", "+avx512vbmi"}  # the products, and bytes that go anywhere in a register
BYTE, WORD = ir.IntType(8), ir.IntType(32)
BYTES, WORDS = ir.VectorType(BYTE, 64), ir.VectorType(WORD, LANES)
SIXTEEN = ir.VectorType(BYTE, LANES)
NOTHING, NOUGHT = ir.Constant(WORDS, None), ir.Constant(VECTOR, None)
PIECE = 16  # bytes of a token in a register, beside those of three others
BLOCK = 512  # tokens whose weights are told by one unit
SIGNED, UNSIGNED = 8_300_000.0, 16_777_000.0  # what three bytes hold, nearly
LEAST = 1e-30  # of the largest of numbers: a unit is that of this at least
ZERO = {INT8: 128, INT4: 8}  # the code of 0, from 0 on
SUMS = 24  # vectors of sums that lie in registers at a time, at most


def dots(kind, heads, group, width, q, first, codes, steps, size, scores):
    """`lanes.dots`."""
    lanes.dots(kind, heads, group, width, q, first, codes, steps, size, scores)


def add_up(kind, heads, group, width, total, first, weights, codes, steps, size):
    """`lanes.add_up`. Weights have room for a multiple of `LANES`, and are 0 behind `size`."""
    lanes.add_up(kind, heads, group, width, total, first, weights, codes, steps, size)


def able(kind, heads, group, width) -> bool:
    """Whether this is for products of bytes; kind, heads, group and width as types."""
    if not all(isinstance(given, types.IntegerLiteral) for given in (kind, heads, group, width)):
        return False
    few = heads.literal_value <= (1 if group.literal_value else 3)
    return kind.literal_value in ZERO and few and features() >= NEEDED


class Products(Code):
    """A `Code` that also writes instructions on bytes and whole numbers, 16 or 64 at a time."""

    def shape(self):
        """(Bytes of a token's codes, channels of a byte, the group of a channel)."""
        kind, _, group = self.known
        return self.types[3].literal_value, 2 if kind == INT4 else 1, lambda j: j // group if group else 0

    def products(self, sums, unsigned, signed):
        """sums + the products of bytes, four by four."""
        kind = ir.FunctionType(WORDS, [WORDS, BYTES, BYTES])
        add = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return self.builder.call(add, [sums, *(self.builder.bitcast(x, BYTES) for x in (unsigned, signed))])

    def pieces(self, codes, rows, column, size, together):
        """`size` bytes from `column` on of four tokens: 16 of each in a vector, side by side the next
        `together` bytes of the four."""
        parts = [self.load(self.at(codes, row, INT(column), ir.VectorType(BYTE, size))) for row in rows]
        while len(parts) > 1 and 2 * parts[0].type.count <= 64:
            both = range(2 * parts[0].type.count)
            parts = [self.shuffled(*two, both) for two in zip(parts[::2], parts[1::2], strict=True)]
        for start in range(0, size, PIECE):
            places = [(byte, token) for byte in range(0, PIECE, together) for token in range(4)]
            order = [token * size + start + byte + i for byte, token in places for i in range(together)]
            yield self.shuffled(parts[0], parts[-1], order)

    def halves_of(self, piece):
        """Codes of int8; of int4 those of the lower and of the upper halves of bytes."""
        if self.known[0] == INT8:
            return [piece]
        b = self.builder
        return [b.and_(piece, _same(BYTES, 15)), b.lshr(piece, _same(BYTES, 4))]

    def four_rows(self, t, start, size):
        """Rows t to t + 3 of those from `start` on, or the last of `size`."""
        b, last = self.builder, self.builder.sub(size, INT(1))
        rows = [b.add(b.add(start, t), INT(i)) for i in range(4)]
        return [b.select(b.icmp_signed("<", row, last), row, last) for row in rows]

    def repeated(self, numbers):
        """A vector of these, as often as they fit."""
        of = ir.VectorType(numbers[0].type, len(numbers))
        made = ir.Constant(of, ir.Undefined)
        for i, number in enumerate(numbers):
            made = self.builder.insert_element(made, number, WORD(i))
        return self.shuffled(made, made, [lane % len(numbers) for lane in range(LANES)])

    def scales(self, steps, rows, group):
        return self.repeated([self.load(self.at(steps, row, INT(group), FLOAT)) for row in rows])

    def over_lanes(self, x, of):
        """The sum, or the largest, of a vector's lanes, in each of them."""
        for step in (8, 4, 2, 1):
            x = of(x, self.shuffled(x, x, [lane ^ step for lane in range(LANES)]))
        return x

    def larger(self, one, other):
        return self.builder.select(self.builder.fcmp_ordered(">", one, other), one, other)

    def nearest(self, x):
        """The whole numbers that are nearest to fp32."""
        kind = ir.FunctionType(VECTOR, [VECTOR])
        near = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.rint.v{LANES}f32")
        return self.builder.fptosi(self.builder.call(near, [x]), WORDS)

    def joined(self, sums):
        """What sums of the products of lowest, middle and highest bytes stand for, as fp32."""
        low, middle, high = (self.builder.sitofp(x, VECTOR) for x in sums)
        return self.sum_of(self.sum_of(low, middle, _same(VECTOR, 2.0**8)), high, _same(VECTOR, 2.0**16))

    def query(self, q, head, channels):
        """For every 16 channels of a query three vectors, of its lowest, middle and highest bytes, each four
        four times, as `pieces` has codes; and the unit of these numbers: NaN where one is NaN or infinite."""
        b = self.builder
        parts = [self.load(self.at(q, head, INT(j), VECTOR)) for j in range(0, channels, LANES)]
        most, spoilt = _same(VECTOR, LEAST), NOUGHT
        for part in parts:
            most = self.larger(b.fneg(part), self.larger(part, most))
            spoilt = self.sum_of(spoilt, part, NOUGHT)
        most = self.over_lanes(most, self.larger)
        by, found = b.fdiv(_same(VECTOR, SIGNED), most), []
        for part in parts:
            whole, three = self.nearest(b.fmul(part, by)), []
            for _ in range(3):
                low = b.ashr(b.shl(whole, _same(WORDS, 24)), _same(WORDS, 24))  # a signed byte
                whole = b.ashr(b.sub(whole, low), _same(WORDS, 8))
                words = b.bitcast(b.trunc(low, SIXTEEN), ir.VectorType(WORD, 4))
                three.append(self.shuffled(words, words, [lane // 4 for lane in range(LANES)]))
            found.append(three)
        unit = b.fmul(most, _same(VECTOR, 1 / SIGNED))
        return found, b.fadd(unit, self.over_lanes(spoilt, b.fadd))

    def weighed(self, weights, head, steps, group, start, size):
        """The weights of `size` tokens from `start` on, times their scales for a group if there are any:
        (places of their lowest, middle and highest bytes, the sums of these, their unit: NaN where one is NaN
        or infinite)."""
        b, kept = (
            self.builder,
            [cgutils.alloca_once(self.builder, ir.ArrayType(BYTE, BLOCK)) for _ in range(3)],
        )
        products = cgutils.alloca_once(b, ir.ArrayType(FLOAT, BLOCK))
        at = lambda array, t, of: b.bitcast(b.gep(array, [INT(0), t]), of.as_pointer())
        most, spoilt = self.sums([_same(VECTOR, LEAST), NOUGHT])
        with self.each(size, LANES) as (t, _):
            found = self.load(self.at(weights, head, b.add(start, t), VECTOR))
            if self.known[2]:
                rows = [
                    row
                    for i in range(0, LANES, 4)
                    for row in self.four_rows(b.add(t, INT(i)), start, b.add(start, size))
                ]
                found = b.fmul(found, self.scales(steps, rows, group))
            b.store(self.larger(found, b.load(most)), most)
            b.store(self.sum_of(b.load(spoilt), found, NOUGHT), spoilt)
            self.store(found, at(products, t, VECTOR))
        most = self.over_lanes(b.load(most), self.larger)
        by, sums = b.fdiv(_same(VECTOR, UNSIGNED), most), self.sums([NOTHING] * 3)
        with self.each(size, LANES) as (t, _):
            whole = self.nearest(b.fmul(self.load(at(products, t, VECTOR)), by))
            for place, total in zip(kept, sums, strict=True):
                low = b.and_(whole, _same(WORDS, 255))
                b.store(b.add(b.load(total), low), total)
                self.store(b.trunc(low, SIXTEEN), at(place, t, SIXTEEN))
                whole = b.lshr(whole, _same(WORDS, 8))
        sums = [self.over_lanes(b.load(total), b.add) for total in sums]
        places = lambda t: [self.repeated([self.load(at(place, t, WORD))]) for place in kept]
        unit = b.fmul(most, _same(VECTOR, 1 / UNSIGNED))
        return places, sums, b.fadd(unit, self.over_lanes(b.load(spoilt), b.fadd))


@intrinsic(prefer_literal=True)
def _dots(context, kind, heads, group, width, q, first, codes, steps, size, scores):
    def code(context, builder, signature, given):
        here = Products(context, builder, signature, given)
        first, size = here.number(5), here.number(8)
        q, codes, steps, scores = (here.array(place) for place in (4, 6, 7, 9))
        (kind, heads, _), (width, halves, group_of) = here.known, here.shape()
        chunk = 2 * PIECE if width % (2 * PIECE) == 0 else PIECE
        zero = _same(BYTES, ZERO[kind])
        heads = [builder.add(first, INT(s)) for s in range(heads)]
        queries = [here.query(q, head, halves * width) for head in heads]
        starts = []  # less what the code of 0 will add
        for query, _ in queries:
            start = {}
            for i, three in enumerate(query):
                sums = start.get(group_of(i * LANES), [NOTHING] * 3)
                sums = [
                    builder.sub(x, here.products(NOTHING, zero, y)) for x, y in zip(sums, three, strict=True)
                ]
                start[group_of(i * LANES)] = sums
            starts.append(start)
        with here.each(size, 4) as (t, _):
            rows = here.four_rows(t, INT(0), size)
            sums = [dict(start) for start in starts]
            for column in range(0, width, chunk):
                for i, piece in enumerate(here.pieces(codes, rows, column, chunk, together=4)):
                    piece = builder.xor(piece, zero) if kind == INT8 else piece
                    for half, part in enumerate(here.halves_of(piece)):
                        channel = half * width + column + i * PIECE
                        g = group_of(channel)
                        for mine, (query, _) in zip(sums, queries, strict=True):
                            three = query[channel // LANES]
                            mine[g] = [here.products(x, part, y) for x, y in zip(mine[g], three, strict=True)]
            for head, mine, (_, unit) in zip(heads, sums, queries, strict=True):
                found = NOUGHT
                for g, three in mine.items():
                    step = unit
                    if here.known[2]:
                        step = builder.fmul(here.scales(steps, rows, g), unit)
                    found = here.sum_of(found, here.joined(three), step)
                a, b, c, d = (here.shuffled(found, found, range(i, i + 4)) for i in range(0, LANES, 4))
                found = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
                here.store(found, here.at(scores, head, t, found.type))
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, q, first, codes, steps, size, scores), code


@overload(dots, prefer_literal=True)
def _dots_of(kind, heads, group, width, q, first, codes, steps, size, scores):
    if not able(kind, heads, group, width):
        return lambda kind, heads, group, width, q, first, codes, steps, size, scores: lanes.dots(
            kind, heads, group, width, q, first, codes, steps, size, scores
        )

    def code(kind, heads, group, width, q, first, codes, steps, size, scores):
        if even(q, first, heads):
            _dots(kind, heads, group, width, q, first, codes, steps, size, scores)
        else:
            lanes.dots(kind, heads, group, width, q, first, codes, steps, size, scores)

    return code


@intrinsic(prefer_literal=True)
def _add_up(context, kind, heads, group, width, total, first, weights, codes, steps, size):
    def code(context, builder, signature, given):
        here = Products(context, builder, signature, given)
        first, size = here.number(5), here.number(9)
        total, weights, codes, steps = (here.array(place) for place in (4, 6, 7, 8))
        (kind, heads, _), (width, halves, group_of) = here.known, here.shape()
        most = max(1, SUMS // (3 * halves * heads))  # pieces at a time
        chunk = 2 * PIECE if width % (2 * PIECE) == 0 and most > 1 else PIECE
        lines = width // chunk
        beside = chunk * max(n for n in range(1, most * PIECE // chunk + 1) if lines % n == 0)
        heads = [builder.add(first, INT(s)) for s in range(heads)]
        groups = sorted({group_of(channel) for channel in range(0, halves * width, LANES)})
        with here.each(size, BLOCK) as (start, _):
            count = builder.sub(size, start)
            count = builder.select(builder.icmp_signed("<", count, INT(BLOCK)), count, INT(BLOCK))
            weighed = [
                [here.weighed(weights, head, steps, g, start, count) for g in groups] for head in heads
            ]
            for begin in range(0, width, beside):
                columns = range(begin, begin + beside, PIECE)
                channels = [half * width + column for column in columns for half in range(halves)]
                sums = {}
                for s in range(len(heads)):
                    for channel in channels:
                        whole = weighed[s][group_of(channel)][1]
                        zero = _same(WORDS, -ZERO[kind] if kind == INT4 else 0)
                        sums[s, channel] = here.sums([builder.mul(x, zero) for x in whole])
                with here.each(count, 4) as (t, _):
                    rows = here.four_rows(t, start, size)
                    parts = [
                        part
                        for column in range(begin, begin + beside, chunk)
                        for piece in here.pieces(codes, rows, column, chunk, together=1)
                        for part in here.halves_of(piece)
                    ]
                    for s in range(len(heads)):
                        words = [places(t) for places, _, _ in weighed[s]]
                        for channel, part in zip(channels, parts, strict=True):
                            for place, word in zip(sums[s, channel], words[group_of(channel)], strict=True):
                                builder.store(here.products(builder.load(place), word, part), place)
                for (s, channel), places in sums.items():
                    unit = weighed[s][group_of(channel)][2]
                    found = here.joined([builder.load(place) for place in places])
                    place = here.at(total, heads[s], INT(channel), VECTOR)
                    here.store(here.sum_of(here.load(place), found, unit), place)
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, total, first, weights, codes, steps, size), code


@overload(add_up, prefer_literal=True)
def _add_up_of(kind, heads, group, width, total, first, weights, codes, steps, size):
    way = _add_up if able(kind, heads, group, width) else lanes.add_up
    return lambda kind, heads, group, width, total, first, weights, codes, steps, size: way(
        kind, heads, group, width, total, first, weights, codes, steps, size
    )
