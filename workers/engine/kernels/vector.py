"""Building blocks of compiled kernels: bits, cache lines and exponentials."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_LINE_BYTES = 64
LOG2_E = np.float32(math.log2(math.e))
LOWEST = np.float32(-1e30)
"""A score that weighs nothing beside any other. Infinity less infinity would be no number."""
POWERS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
"""Cephes' polynomial for 2^x, |x| ≤ 0.5."""


@intrinsic
def bits_as_float(_: Any, bits: Any) -> Any:
    """Reinterpret 32 bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], _F32)


@intrinsic
def _fetch(_: Any, address: Any) -> Any:
    """Begin to bring the cache line of an address nearer, without waiting for it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, kind = "llvm.prefetch.p0i8", ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        prefetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        read, near, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(args[0], _I8.as_pointer()), read, near, data])
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def widen(_: Any, element: Any) -> Any:
    """An element of the pool as float32: float32 itself, or the bits of a bfloat16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(element), code


@njit(inline="always", error_model="numpy")
def exp(x: Any) -> Any:
    """e to a power of at most 0, within 2e-7: 2^n by exponent bits, the rest by the Cephes polynomial for 2^x. Unlike
    the library function it can be vectorised."""
    y = max(x * LOG2_E, np.float32(-126.0))
    whole = math.floor(y + np.float32(0.5))
    part = np.float32(y - whole)
    p = np.float32(POWERS[0])
    for power in POWERS[1:]:
        p = p * part + np.float32(power)
    return p * bits_as_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@njit(error_model="numpy")
def prefetch(source: Any, slots: Any, head: int) -> None:
    """Computing hides the way of the next tile, which the hardware cannot guess: the rows of a head are apart."""
    for t in range(len(slots)):
        line = source[slots[t], head]
        for at in range(0, len(line) * line.itemsize, _LINE_BYTES):
            _fetch(line.ctypes.data + at)
