"""Building blocks of the compiled kernels: bits, exponentials, and a product of a few rows with a panel of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 16
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
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


@cache
def panel_product(rows: int, vectors: int) -> Callable[..., None]:
    """A kernel `(a, lda, w, depth, c, ldc)`: `c[r, :] = sum over k of a[r, k] * w[k, :]` for `rows` rows and
    `16 * vectors` columns, all accumulators in registers (the inner kernel of Goto and van de Geijn, 2008).

    `a` and `c` are addresses of float32 with row strides `lda` and `ldc` in elements; `w` is the address of a panel of
    bfloat16 bits, `[depth, 16 * vectors]` without gaps. Compilers do not find this form in plain loops.
    """

    @intrinsic
    def kernel(_: Any, a: Any, lda: Any, w: Any, depth: Any, c: Any, ldc: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit(builder, rows, vectors, *args)
            return context.get_dummy_value()

        return types.void(a, lda, w, depth, c, ldc), code

    return kernel


def _emit(b: Any, rows: int, vectors: int, a: Any, lda: Any, w: Any, depth: Any, c: Any, ldc: Any) -> None:
    """Write the loop over `depth` with one phi node for each accumulator."""
    fma = b.module.globals.get("llvm.fma.v16f32")
    if fma is None:
        fma = ir.Function(b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.fma.v16f32")
    a, c = b.inttoptr(a, _F32.as_pointer()), b.inttoptr(c, _F32.as_pointer())
    w = b.inttoptr(w, _I16.as_pointer())
    begin, loop, end = b.block, b.append_basic_block("depth"), b.append_basic_block("done")
    sources = [b.gep(a, [b.mul(lda, ir.Constant(_I64, row))]) for row in range(rows)]
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(_I64)
    k.add_incoming(ir.Constant(_I64, 0), begin)
    sums = [[b.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    panel = b.gep(w, [b.mul(k, ir.Constant(_I64, LANES * vectors))])
    weights = [_load_widened(b, b.gep(panel, [ir.Constant(_I64, LANES * at)])) for at in range(vectors)]
    added = []
    for row in range(rows):
        factor = _broadcast(b, b.load(b.gep(sources[row], [k])))
        added.append([b.call(fma, [factor, weight, sums[row][at]]) for at, weight in enumerate(weights)])
    following = b.add(k, ir.Constant(_I64, 1))
    k.add_incoming(following, loop)
    for row in range(rows):
        for at in range(vectors):
            sums[row][at].add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), begin)
            sums[row][at].add_incoming(added[row][at], loop)
    b.cbranch(b.icmp_signed("<", following, depth), loop, end)
    b.position_at_end(end)
    for row in range(rows):
        for at in range(vectors):
            target = b.gep(c, [b.add(b.mul(ldc, ir.Constant(_I64, row)), ir.Constant(_I64, LANES * at))])
            b.store(added[row][at], b.bitcast(target, _VECTOR.as_pointer()), align=4)


def _load_widened(b: Any, pointer: Any) -> Any:
    """16 bfloat16 as float32."""
    whole = ir.VectorType(_I32, LANES)
    bits = b.load(b.bitcast(pointer, ir.VectorType(_I16, LANES).as_pointer()), align=2)
    return b.bitcast(b.shl(b.zext(bits, whole), ir.Constant(whole, [16] * LANES)), _VECTOR)


def _broadcast(b: Any, scalar: Any) -> Any:
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)
