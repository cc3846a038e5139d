"""Queries times K and weights times V of int4, for registers of 8 numbers: processors without AVX-512.

To bring half a byte to where a number is made of it takes longer there than the number, so it stays where it
is: eight words of 16 bits hold four codes each, of which a mask leaves one. That is the code times 1, 16, 256
or 4,096, so what multiplies it is divided by that beforehand, a query once for all tokens, and totals of V at
the end. Nor is 8, the code of 0, taken from every code: 8 times the query, or the sum of weights, is taken
from the sum. Beside 8 times an outlier a query's other channels would be rounded off, where keys lack its
channel: such queries are multiplied as numbers (`lanes.even`).

`dots` and `add_up` are those of `lanes.py`, which says what they are given, and which runs for other codes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from . import lanes
from .lanes import FLOAT, FUSED, INT, INT4, LANES, VECTOR, Code, _same, even, features

EIGHT, SHORTS = ir.VectorType(FLOAT, 8), ir.VectorType(ir.IntType(16), 8)
WORDS = ir.VectorType(ir.IntType(32), 8)
NOUGHT = ir.Constant(EIGHT, None)
PIECE = 16  # bytes that make a vector of each of four codes
ZERO = 8.0  # the code of 0
BLOCK = 64  # tokens whose weights are added up before what 8 of them add is taken away again
BESIDE = 2  # pieces, or query heads, whose sums lie in registers at a time


def dots(kind, heads, group, width, q, first, codes, steps, size, scores):
    """`lanes.dots`."""
    lanes.dots(kind, heads, group, width, q, first, codes, steps, size, scores)


def add_up(kind, heads, group, width, total, first, weights, codes, steps, size):
    """`lanes.add_up`."""
    lanes.add_up(kind, heads, group, width, total, first, weights, codes, steps, size)


def able(kind, width) -> bool:
    """Whether this is for words of codes; kind and width as types."""
    if not isinstance(kind, types.IntegerLiteral) or not isinstance(width, types.IntegerLiteral):
        return False
    return kind.literal_value == INT4 and "+avx512f" not in features()


class Nibbles(Code):
    """A `Code` that also writes instructions on 8 numbers at a time. A piece is four vectors: of 16
    channels of lower halves of bytes, and of 16 of upper ones, every other one; then those between."""

    def numbers_of(self, codes, row, column):
        """A piece of a token's codes, times 1, 16, 256 and 4,096."""
        b = self.builder
        words = b.zext(self.load(self.at(codes, row, INT(column), SHORTS)), WORDS)
        return [b.sitofp(b.and_(words, _same(WORDS, 15 << 4 * i)), EIGHT) for i in range(4)]

    def halves_at(self, array, row, column):
        """Where the 16 channels of the lower halves of a piece lie, and those of the upper ones."""
        width = self.types[3].literal_value
        return [self.at(array, row, INT(channel), VECTOR) for channel in (column, width + column)]

    def piece(self, places):
        halves = [self.load(place) for place in places]
        return [self.shuffled(x, x, range(odd, LANES, 2)) for odd in (0, 1) for x in halves]

    def put(self, piece, places):
        both = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
        for one, next_one, place in zip(piece[:2], piece[2:], places, strict=True):
            self.store(self.shuffled(one, next_one, both), place)

    def times(self, vector, number: float):
        return self.builder.fmul(vector, _same(EIGHT, number), flags=FUSED)

    def eight_times(self, number):
        one = self.builder.insert_element(ir.Constant(EIGHT, ir.Undefined), number, ir.IntType(32)(0))
        return self.shuffled(one, one, [0] * 8)

    def scale(self, steps, row, group):
        return self.eight_times(self.load(self.at(steps, row, INT(group), FLOAT)))

    def groups_of(self, column):
        """The group of each vector of a piece."""
        group, width = self.known[2], self.types[3].literal_value
        return [(half + column) // group if group else 0 for half in (0, width)] * 2

    def sums_of(self, column):
        """Which sum of a token each vector of a piece adds to: each half has one, so none is waited for."""
        return [(i % 2, group) for i, group in enumerate(self.groups_of(column))]

    def joined(self, sums, scales):
        """The sum of sums, times their scales if there are any."""
        first, *others = ((x, scales.get(g)) for (_, g), x in sums.items())
        total = first[0] if first[1] is None else self.builder.fmul(*first, flags=FUSED)
        for x, scale in others:
            total = self.sum_of(total, x, scale) if scales else self.builder.fadd(total, x, flags=FUSED)
        return total

    def four_of(self, a, b, c, d):
        """The sums of the lanes of four vectors, as one of four."""
        halves = [(range(4), range(4, 8)), ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])]
        (low, high), (first, second) = halves
        add = lambda *two: self.builder.fadd(*two, flags=FUSED)
        x, y = (
            add(*(self.shuffled(one, other, [*part, *(8 + i for i in part)]) for part in (low, high)))
            for one, other in ((a, c), (b, d))
        )
        x = add(self.shuffled(x, y, first), self.shuffled(x, y, second))
        return add(self.shuffled(x, x, range(0, 8, 2)), self.shuffled(x, x, range(1, 8, 2)))

    def added(self, total, heads, weights, codes, steps, columns, start, count):
        """Add the V of `count` tokens from `start` on to these columns' totals."""
        b, groups = self.builder, sorted({g for column in columns for g in self.groups_of(column)})
        sums = {(s, column): self.sums([NOUGHT] * 4) for s in range(len(heads)) for column in columns}
        whole = {(s, g): self.sums([NOUGHT])[0] for s in range(len(heads)) for g in groups}
        with self.each(count, 1) as (i, _):
            t = b.add(start, i)
            numbers = {column: self.numbers_of(codes, t, column) for column in columns}
            scales = {g: self.scale(steps, t, g) for g in groups if self.known[2]}
            for s, head in enumerate(heads):
                weight = self.eight_times(self.load(self.at(weights, head, t, FLOAT)))
                own = {g: b.fmul(weight, scales[g]) if scales else weight for g in groups}
                for g in groups:
                    b.store(b.fadd(b.load(whole[s, g]), own[g], flags=FUSED), whole[s, g])
                for column in columns:
                    of = zip(sums[s, column], numbers[column], self.groups_of(column), strict=True)
                    for place, number, g in of:
                        b.store(self.sum_of(b.load(place), number, own[g]), place)
        for (s, column), places in sums.items():
            kept = self.halves_at(total, heads[s], column)
            piece = []
            for i, (x, g) in enumerate(zip(self.piece(kept), self.groups_of(column), strict=True)):
                x = self.sum_of(x, b.load(places[i]), _same(EIGHT, 16.0**-i))
                piece.append(self.sum_of(x, b.load(whole[s, g]), _same(EIGHT, -ZERO)))
            self.put(piece, kept)


@intrinsic(prefer_literal=True)
def _dots(context, kind, heads, group, width, q, first, codes, steps, size, scores):
    def code(context, builder, signature, given):
        here = Nibbles(context, builder, signature, given)
        first, size = here.number(5), here.number(8)
        q, codes, steps, scores = (here.array(place) for place in (4, 6, 7, 9))
        columns = range(0, signature.args[3].literal_value, PIECE)
        heads = [builder.add(first, INT(s)) for s in range(here.known[1])]
        queries, starts = [], []  # less what the code of 0 will add
        for head in heads:
            query, start = {}, {}
            for column in columns:
                piece = here.piece(here.halves_at(q, head, column))
                query[column] = [here.times(x, 16.0**-i) for i, x in enumerate(piece)]
                for g, x in zip(here.sums_of(column), piece, strict=True):
                    start[g] = here.sum_of(start.get(g, NOUGHT), x, _same(EIGHT, -ZERO))
            queries.append(query)
            starts.append(start)
        last = builder.sub(size, INT(1))
        with here.each(size, 4) as (t, _):
            rows = [builder.add(t, INT(i)) for i in range(4)]
            rows = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
            found = []
            for row in rows:
                sums = [dict(start) for start in starts]
                for column in columns:
                    numbers = here.numbers_of(codes, row, column)
                    for mine, query in zip(sums, queries, strict=True):
                        for g, x, asked in zip(here.sums_of(column), numbers, query[column], strict=True):
                            mine[g] = here.sum_of(mine[g], x, asked)
                scales = {g: here.scale(steps, row, g) for _, g in sums[0] if here.known[2]}
                found.append([here.joined(mine, scales) for mine in sums])
            for head, four in zip(heads, zip(*found, strict=True), strict=True):
                score = here.four_of(*four)
                here.store(score, here.at(scores, head, t, score.type))
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, q, first, codes, steps, size, scores), code


@overload(dots, prefer_literal=True)
def _dots_of(kind, heads, group, width, q, first, codes, steps, size, scores):
    if not able(kind, width):
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
        here = Nibbles(context, builder, signature, given)
        first, size = here.number(5), here.number(9)
        total, weights, codes, steps = (here.array(place) for place in (4, 6, 7, 8))
        columns = range(0, signature.args[3].literal_value, PIECE)
        heads = [builder.add(first, INT(s)) for s in range(here.known[1])]
        most = 1 if here.known[2] else BESIDE
        turns = [heads[s : s + most] for s in range(0, len(heads), most)]
        beside = most if len(heads) == 1 and len(columns) % most == 0 else 1
        with here.each(size, BLOCK) as (start, _):
            count = builder.sub(size, start)
            count = builder.select(builder.icmp_signed("<", count, INT(BLOCK)), count, INT(BLOCK))
            for begin in range(0, len(columns), beside):
                for turn in turns:
                    here.added(
                        total, turn, weights, codes, steps, columns[begin : begin + beside], start, count
                    )
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, total, first, weights, codes, steps, size), code


@overload(add_up, prefer_literal=True)
def _add_up_of(kind, heads, group, width, total, first, weights, codes, steps, size):
    way = _add_up if able(kind, width) else lanes.add_up
    return lambda kind, heads, group, width, total, first, weights, codes, steps, size: way(
        kind, heads, group, width, total, first, weights, codes, steps, size
    )
