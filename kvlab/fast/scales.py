"""Scales in fp16, as bits, and what they are in fp32: by the processor where it knows fp16."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .lanes import FAST, FLOAT, INT, LANES, VECTOR, Code, features

# Small floats are widened by moving their bits and adding to the exponent. A multiplication would be shorter,
# but fast math moves its factor out of the sum, where it overflows.


@njit(fastmath=FAST)
def _half(bits):
    """The fp16 number, finite and not negative, whose bits are `bits` (uint16), as fp32."""
    bits = np.int32(bits)
    if bits < 1024:  # subnormal
        return np.float32(bits) * np.float32(2.0**-24)
    return np.int32((bits << 13) + (112 << 23)).view(np.float32)


def widened(scales, at, size, steps):
    """The scales `[tokens, groups]`, as bits of fp16, of `size` tokens from `at` on, into steps `[tokens,
    groups]` as fp32."""
    found = steps.reshape(-1)
    for i, bits in enumerate(scales.reshape(-1)[at * scales.shape[1] : (at + size) * scales.shape[1]]):
        found[i] = _half(bits)


@intrinsic
def _widened(context, scales, at, size, steps):
    """`widened`, where the processor converts fp16."""

    def code(context, builder, signature, given):
        here = Code(context, builder, signature, given)
        scales, at, size, steps = here.array(0), here.number(1), here.number(2), here.array(3)
        groups = cgutils.unpack_tuple(builder, scales[1].shape, 2)[1]
        count = builder.mul(size, groups)
        lined = builder.and_(count, INT(-LANES))
        halves, numbers = here.at(scales, at, INT(0), ir.HalfType()), here.at(steps, INT(0), INT(0), FLOAT)

        def widen(i, half, wide):
            found = here.load(builder.bitcast(builder.gep(halves, [i]), half.as_pointer()))
            here.store(
                builder.fpext(found, wide), builder.bitcast(builder.gep(numbers, [i]), wide.as_pointer())
            )

        with here.each(lined, LANES) as (i, _):
            widen(i, ir.VectorType(ir.HalfType(), LANES), VECTOR)
        with cgutils.for_range_slice(builder, lined, count, INT(1), INT) as (i, _):
            widen(i, ir.HalfType(), FLOAT)
        return context.get_dummy_value()

    return types.none(scales, types.int64, types.int64, steps), code


@overload(widened)
def _widened_of(scales, at, size, steps):
    if "+f16c" in features():
        return lambda scales, at, size, steps: _widened(scales, at, size, steps)

    def code(scales, at, size, steps):
        groups = scales.shape[1]
        flat, found = scales.reshape(-1)[at * groups : (at + size) * groups], steps.reshape(-1)
        for i in range(flat.shape[0]):
            found[i] = _half(flat[i])

    return code
