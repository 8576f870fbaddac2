"""Building blocks of compiled kernels: bits and exponentials."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_LOG2_E = np.float32(math.log2(math.e))


@intrinsic
def bits_as_float(_: Any, bits: Any) -> Any:
    """Reinterpret 32 bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], _F32)


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
    y = max(x * _LOG2_E, np.float32(-126.0))
    whole = math.floor(y + np.float32(0.5))
    part = np.float32(y - whole)
    p = np.float32(1.535336188319500e-4)
    p = p * part + np.float32(1.339887440266574e-3)
    p = p * part + np.float32(9.618437357674640e-3)
    p = p * part + np.float32(5.550332471162809e-2)
    p = p * part + np.float32(2.402264791363012e-1)
    p = p * part + np.float32(6.931472028550421e-1)
    p = p * part + np.float32(1.0)
    return p * bits_as_float(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
