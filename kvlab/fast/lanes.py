"""Lanes: how a kernel on a CPU turns stored codes into numbers, sixteen at a time, and adds them up.

A compiler turns a plain loop over channels into slow code: it sums the lanes of a register for every token
and query head, and it decodes each code again for every head. So the two loops that take most of a decode
step are written here with vectors of 16 fp32 numbers: `dots` multiplies queries by four tokens of K, and
`add_up` multiplies weights by V. Each code is decoded once for all query heads, and the lanes of four tokens
are summed together. LLVM puts such a vector into one AVX-512 register, two AVX2 registers, or four of a
smaller machine. Only compiled code can call them; `tests/fast/test_every_shape.py` has them in Python.

Codes are `[tokens, width]`. A byte of int4 holds channels j and head_dim / 2 + j, so int4 codes are half as
wide as the numbers. steps fp32 `[tokens, groups]`: the scale of each group of channels; a group is a multiple
of 16 channels, and group 0 means no scales.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

INT8, INT4, E4M3, E5M2, F32, BF16 = range(6)  # kinds of codes; bf16 as its bits
FAST = {
    "reassoc",
    "contract",
    "nsz",
    "arcp",
}  # without nnan and ninf, which take NaN and infinity for impossible
LANES = 16
UNIT = 256.0  # what numbers of 8 bits, e4m3, must be multiplied by: as fp16 is read, their exponent is 8 less
SUMS = 8  # vectors of sums that lie in registers at a time, at most

INT, FLOAT = ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
FUSED = ("contract",)  # a product and a sum may be one operation


def dots(kind, heads, group, width, q, first, codes, steps, size, scores):
    """Query heads `first` to `first + heads - 1` times the K of the first `size` tokens, into their scores.
    For e4m3 a score is 1 / `UNIT` of the true one. Four tokens are computed together, so up to three scores
    after the end repeat the last one.

    q `[heads, channels]`, scores `[heads, tokens]`. kind, heads and group must be constants when this is
    compiled, and so should width.
    """
    raise NotImplementedError


def add_up(kind, heads, group, width, total, first, weights, codes, steps, size):
    """Add the V of the first `size` tokens, each times its weight for a query head, to the totals of the
    heads `first` to `first + heads - 1`. For e4m3 a total is 1 / `UNIT` of the true one.

    total `[heads, channels]`, weights `[heads, tokens]`; the others as in `dots`.
    """
    raise NotImplementedError


def largest(scores, s, size, least):
    """The largest of the first `size` scores, a multiple of `LANES`, of query head s, or `least` if that is
    larger. NaN is skipped, because a loop that has to handle NaN is not vectorized."""
    raise NotImplementedError


class Code:
    """Emits LLVM's instructions (`builder`) for the function that is being compiled, and knows its arrays."""

    def __init__(self, context, builder, signature, given):
        self.context, self.builder = context, builder
        self.types, self.given = signature.args, given
        machine, _, features = context.codegen().magic_tuple()
        self.looks_up = "+avx512f" in features  # numbers in a register, by an index
        self.fp16 = "+f16c" in features or machine.startswith(("aarch64", "arm64"))

    @property
    def known(self) -> tuple[int, int, int]:
        """Kind, query heads and group."""
        return tuple(kind.literal_value for kind in self.types[:3])

    def number(self, place: int):
        """An integer argument, as a constant if it is one."""
        known = getattr(self.types[place], "literal_value", None)
        if known is not None:
            return INT(known)
        return self.context.cast(self.builder, self.given[place], self.types[place], types.int64)

    def array(self, place: int):
        """(Type, array) of an argument."""
        of = self.types[place]
        return of, self.context.make_array(of)(self.context, self.builder, self.given[place])

    def at(self, array, row, column, of):
        """A pointer to an entry of a table, as LLVM's type `of`."""
        pointer = cgutils.get_item_pointer(self.context, self.builder, *array, [row, column])
        return self.builder.bitcast(pointer, of.as_pointer())

    def load(self, pointer):
        made = self.builder.load(pointer)
        made.align = 1
        return made

    def store(self, vector, pointer):
        self.builder.store(vector, pointer).align = 1

    def shuffled(self, one, other, lanes):
        return self.builder.shuffle_vector(one, other, _many(ir.IntType(32), lanes))

    def everywhere(self, number):
        """A vector with this number in every lane."""
        one = self.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.IntType(32)(0))
        return self.shuffled(one, one, [0] * LANES)

    def sum_of(self, total, one, other):
        """total + one * other."""
        product = self.builder.fmul(one, other, flags=FUSED)
        return self.builder.fadd(total, product, flags=FUSED)

    def numbers(self, codes, steps, row, column):
        """(Channel of its first lane, vector) of 16 codes of a row; int4 gives two of these."""
        builder, (kind, _, grouped) = self.builder, self.known
        raw = self.load(self.at(codes, row, column, ir.VectorType(STORED[kind], LANES)))
        if kind == INT4:
            halves = self.looked_up(raw) if self.looks_up else self.counted(raw)
            found = list(zip((column, builder.add(self.width, column)), halves, strict=True))
        elif kind == INT8:
            found = [(column, self.whole(raw))]
        elif kind == F32:
            found = [(column, raw)]
        elif kind == BF16:
            wide = builder.zext(raw, ir.VectorType(ir.IntType(32), LANES))
            found = [(column, builder.bitcast(builder.shl(wide, _same(wide.type, 16)), VECTOR))]
        else:
            found = [(column, self.small(kind, raw))]
        if not grouped:
            return found
        scaled = []
        for channel, vector in found:
            group = builder.udiv(channel, INT(grouped))
            step = self.everywhere(self.load(self.at(steps, row, group, FLOAT)))
            scaled.append((channel, builder.fmul(vector, step)))
        return scaled

    def counted(self, raw):
        """The numbers in the lower halves of bytes, and those in the upper halves."""
        builder, eight = self.builder, _same(raw.type, 8)
        for half in (builder.and_(raw, _same(raw.type, 15)), builder.lshr(raw, _same(raw.type, 4))):
            yield self.whole(builder.sub(half, eight))

    def looked_up(self, raw):
        """The same with AVX-512, which looks a number up in a register by the lowest four bits of an
        index."""
        builder, wide = self.builder, ir.VectorType(ir.IntType(32), LANES)
        table = ir.Constant(VECTOR, [FLOAT(code - 8.0) for code in range(16)])
        kind = ir.FunctionType(VECTOR, [VECTOR, wide])
        find = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        index = builder.zext(raw, wide)
        for indices in (index, builder.lshr(index, _same(wide, 4))):
            yield builder.call(find, [table, indices])

    def small(self, kind, raw):
        """8-bit floats (for e4m3, 1 / `UNIT` of them): the bits are moved to the exponent and mantissa of
        fp16. If the processor has no fp16, they are moved to those of fp32, which gives 2^-112 of the
        number."""
        builder, bits = self.builder, 16 if self.fp16 else 32
        wide = ir.VectorType(ir.IntType(bits), LANES)
        shift = (7 if self.fp16 else 20) + (kind == E5M2)
        kept = 127 << shift | 1 << bits - 1  # of a sign that is copied upwards, the highest
        bits = builder.and_(builder.shl(builder.sext(raw, wide), _same(wide, shift)), _same(wide, kept))
        if self.fp16:
            return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
        return builder.fmul(builder.bitcast(bits, VECTOR), _same(VECTOR, 2.0**112))

    def whole(self, vector):
        """Signed bytes as fp32."""
        wide = self.builder.sext(vector, ir.VectorType(ir.IntType(32), LANES))
        return self.builder.sitofp(wide, VECTOR)

    def four(self, a, b, c, d):
        """The lane sums of four vectors, as one vector of four."""
        both = [self.halves(*pair, 8) for pair in ((a, b), (c, d))]
        x = self.halves(*both, 4)
        for step in (2, 1):
            other = self.shuffled(x, x, [lane ^ step for lane in range(LANES)])
            x = self.builder.fadd(x, other, flags=FUSED)
        return self.shuffled(x, x, [0, 4, 8, 12])

    def halves(self, one, other, size):
        """In every 2 * size lanes of the first vector, then of the second: the first half plus the second
        half."""
        first = [lane for lane in range(2 * LANES) if lane % (2 * size) < size]
        second = [lane + size for lane in first]
        parts = (self.shuffled(one, other, lanes) for lanes in (first, second))
        return self.builder.fadd(*parts, flags=FUSED)

    def sums(self, start):
        """Vectors that a loop adds to; they begin as `start`."""
        variables = [cgutils.alloca_once(self.builder, vector.type) for vector in start]
        for place, vector in zip(variables, start, strict=True):
            self.builder.store(vector, place)
        return variables

    def each(self, stop, step):
        return cgutils.for_range_slice(self.builder, INT(0), stop, INT(step), INT)


STORED = {
    **dict.fromkeys((INT8, INT4, E4M3, E5M2), ir.IntType(8)), F32: FLOAT, BF16: ir.IntType(16)
}  # fmt: skip


def _many(kind, numbers):
    return ir.Constant(ir.VectorType(kind, len(numbers)), [kind(number) for number in numbers])


def _same(vector, number):
    return _many(vector.element, [number] * vector.count)


@intrinsic(prefer_literal=True)
def _four_dots(context, kind, heads, group, width, q, first, codes, steps, size, scores, t):
    """`dots` of four tokens, t and the next three."""

    def code(context, builder, signature, given):
        here = Code(context, builder, signature, given)
        here.width, first, size, t = (here.number(place) for place in (3, 5, 8, 10))
        q, codes, steps, scores = (here.array(place) for place in (4, 6, 7, 9))
        rows, last = [builder.add(t, INT(i)) for i in range(4)], builder.sub(size, INT(1))
        rows = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
        heads = [builder.add(first, INT(s)) for s in range(here.known[1])]
        sums = here.sums([ir.Constant(VECTOR, None)] * (4 * len(heads)))
        with here.each(here.width, LANES) as (column, _):
            for i, row in enumerate(rows):
                for channel, number in here.numbers(codes, steps, row, column):
                    for s, head in enumerate(heads):
                        asked = here.load(here.at(q, head, channel, VECTOR))
                        place = sums[4 * s + i]
                        builder.store(here.sum_of(builder.load(place), asked, number), place)
        for s, head in enumerate(heads):
            found = here.four(*(builder.load(place) for place in sums[4 * s : 4 * s + 4]))
            here.store(found, here.at(scores, head, t, found.type))
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, q, first, codes, steps, size, scores, t), code


@overload(dots, prefer_literal=True)
def _dots(kind, heads, group, width, q, first, codes, steps, size, scores):
    def code(kind, heads, group, width, q, first, codes, steps, size, scores):
        for t in range(0, size, 4):
            _four_dots(kind, heads, group, width, q, first, codes, steps, size, scores, t)

    return code


@intrinsic(prefer_literal=True)
def _add_up(context, kind, heads, group, width, total, first, weights, codes, steps, size):
    def code(context, builder, signature, given):
        here = Code(context, builder, signature, given)
        here.width, first, size = (here.number(place) for place in (3, 5, 9))
        total, weights, codes, steps = (here.array(place) for place in (4, 6, 7, 8))
        heads = [builder.add(first, INT(s)) for s in range(here.known[1])]
        halves = 2 if here.known[0] == INT4 else 1
        lines = getattr(signature.args[3], "literal_value", 2 * LANES) // LANES
        most = max(1, SUMS // (halves * len(heads)))
        beside = max(n for n in range(1, most + 1) if lines % n == 0)  # vectors of codes at a time
        with here.each(here.width, beside * LANES) as (column, _):
            columns = [builder.add(column, INT(i * LANES)) for i in range(beside)]
            channels = columns + [builder.add(here.width, c) for c in columns] * (halves - 1)
            addresses = [here.at(total, head, channel, VECTOR) for head in heads for channel in channels]
            sums = here.sums([here.load(place) for place in addresses])
            with here.each(size, 1) as (t, _):
                found = [here.numbers(codes, steps, t, c) for c in columns]
                found = [vector for half in range(halves) for _, vector in (pair[half] for pair in found)]
                for s, head in enumerate(heads):
                    weight = here.everywhere(here.load(here.at(weights, head, t, FLOAT)))
                    for i, vector in enumerate(found):
                        place = sums[s * len(found) + i]
                        builder.store(here.sum_of(builder.load(place), weight, vector), place)
            for place, found in zip(addresses, sums, strict=True):
                here.store(builder.load(found), place)
        return context.get_dummy_value()

    return types.none(kind, heads, group, width, total, first, weights, codes, steps, size), code


@overload(add_up, prefer_literal=True)
def _add_up_of(kind, heads, group, width, total, first, weights, codes, steps, size):
    return lambda kind, heads, group, width, total, first, weights, codes, steps, size: _add_up(
        kind, heads, group, width, total, first, weights, codes, steps, size
    )


@intrinsic
def _largest(context, scores, s, size, least):
    def code(context, builder, signature, given):
        here = Code(context, builder, signature, given)
        scores, s, size = here.array(0), here.number(1), here.number(2)
        (best,) = here.sums([here.everywhere(given[3])])

        def larger(one):
            other = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", one, other), one, other), best)

        with here.each(size, LANES) as (t, _):
            larger(here.load(here.at(scores, s, t, VECTOR)))
        for step in (8, 4, 2, 1):
            x = builder.load(best)
            larger(here.shuffled(x, x, [lane ^ step for lane in range(LANES)]))
        return builder.extract_element(builder.load(best), ir.IntType(32)(0))

    return types.float32(scores, types.int64, types.int64, types.float32), code


@overload(largest)
def _largest_of(scores, s, size, least):
    return lambda scores, s, size, least: _largest(scores, s, size, least)
