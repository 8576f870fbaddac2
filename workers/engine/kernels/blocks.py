"""Inner loops of compiled kernels that compilers do not find by themselves, written in LLVM's language: a product of
matrices in the cache, and a running softmax of many rows."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from workers.engine.kernels.vector import LOG2_E, POWERS

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _shape() -> tuple[int, int]:
    """Lanes of a vector register, and rows of a block of accumulators: three vectors of each row fit the registers."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 8
    return (4, 8) if features.get("neon") else (8, 4)


LANES, ROWS = _shape()
_VECTOR = ir.VectorType(_F32, LANES)


def _block(vectors: int) -> Any:
    """`add_product` for ROWS rows and `vectors * LANES` columns, all accumulators in registers (the inner kernel of
    Goto and van de Geijn, 2008). Compilers do not find this form in plain loops."""

    @intrinsic
    def block(_: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_step: Any, depth: Any, c: Any, c_row: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_block(builder, vectors, *args)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, b_step, depth, c, c_row), code

    return block


def _emit_block(
    to: Any, vectors: int, a: Any, a_row: Any, a_step: Any, b: Any, b_step: Any, depth: Any, c: Any, c_row: Any
) -> None:
    a, b, c = (to.inttoptr(address, _F32.as_pointer()) for address in (a, b, c))
    sources = [to.gep(a, [to.mul(a_row, ir.Constant(_I64, row))]) for row in range(ROWS)]
    lines = [to.gep(c, [to.mul(c_row, ir.Constant(_I64, row))]) for row in range(ROWS)]
    targets = [_vector_at(to, line, LANES * at) for line in lines for at in range(vectors)]

    def step(k: Any, sums: list[Any]) -> list[Any]:
        line, column = to.gep(b, [to.mul(k, b_step)]), to.mul(k, a_step)
        right = [to.load(_vector_at(to, line, LANES * at), align=4) for at in range(vectors)]
        left = [_broadcast(to, to.load(to.gep(source, [column]))) for source in sources]
        # "muladd" is fused where the CPU can do it, unlike "fma", which is a library call elsewhere.
        return [_call(to, "fmuladd", left[at // vectors], right[at % vectors], one) for at, one in enumerate(sums)]

    sums = _loop(to, depth, [to.load(target, align=4) for target in targets], step)
    for target, one in zip(targets, sums, strict=True):
        to.store(one, target, align=4)


@intrinsic
def soften(_: Any, scores: Any, step: Any, tokens: Any, top: Any, mass: Any, shrink: Any) -> Any:
    """The running softmax of LANES rows over some tokens. All but numbers are addresses of float32. Scores, those of a
    token `step` elements behind those of the one before, become weights; `top`, the highest score, and `mass`, the sum
    of weights, are brought up to date; `shrink` becomes the factor by which older weights are to shrink."""

    def code(context: Any, to: Any, signature: Any, args: Any) -> Any:
        line, top, mass, shrink = (to.inttoptr(args[at], _F32.as_pointer()) for at in (0, 3, 4, 5))
        step, tokens = args[1:3]
        top, mass, shrink = (_vector_at(to, one, 0) for one in (top, mass, shrink))

        def higher(t: Any, highest: list[Any]) -> list[Any]:
            score = to.load(_vector_at(to, to.gep(line, [to.mul(t, step)]), 0), align=4)
            return [_larger(to, score, highest[0])]

        def weigh(t: Any, total: list[Any]) -> list[Any]:
            at = _vector_at(to, to.gep(line, [to.mul(t, step)]), 0)
            weight = _exp(to, to.fsub(to.load(at, align=4), highest))
            to.store(weight, at, align=4)
            return [to.fadd(total[0], weight)]

        before = to.load(top, align=4)
        (highest,) = _loop(to, tokens, [before], higher)
        less = _exp(to, to.fsub(before, highest))
        (total,) = _loop(to, tokens, [to.fmul(to.load(mass, align=4), less)], weigh)
        for value, at in ((highest, top), (total, mass), (less, shrink)):
            to.store(value, at, align=4)
        return context.get_dummy_value()

    return types.void(scores, step, tokens, top, mass, shrink), code


def _exp(to: Any, x: Any) -> Any:
    """See `exp`. NaN gives NaN, by way of `part`: what is spoilt has to show in the result."""
    scaled, least = to.fmul(x, _constant(LOG2_E)), _constant(-126)
    y = to.select(to.fcmp_ordered("<", scaled, least), least, scaled)
    whole = _call(to, "floor", to.fadd(_larger(to, scaled, least), _constant(0.5)))
    part = to.fsub(y, whole)
    p = _constant(POWERS[0])
    for power in POWERS[1:]:
        p = _call(to, "fmuladd", p, part, _constant(power))
    integers = ir.VectorType(_I32, LANES)
    bits = to.shl(
        to.add(to.fptosi(whole, integers), ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES)
    )
    return to.fmul(p, to.bitcast(bits, _VECTOR))


def _larger(to: Any, x: Any, y: Any) -> Any:
    """One instruction, unlike the operation that also looks for NaNs; of NaN and `y`, `y`."""
    return to.select(to.fcmp_ordered(">", x, y), x, y)


def _loop(to: Any, count: Any, carried: list[Any], step: Any) -> list[Any]:
    """`carried = step(k, carried)` for `k` up to `count`, which is positive; gives the last ones."""
    begin, loop, end = to.block, to.append_basic_block("loop"), to.append_basic_block("done")
    to.branch(loop)
    to.position_at_end(loop)
    k, now = to.phi(_I64), [to.phi(one.type) for one in carried]
    then = step(k, now)
    following = to.add(k, ir.Constant(_I64, 1))
    k.add_incoming(ir.Constant(_I64, 0), begin)
    k.add_incoming(following, loop)
    for one, first, next_ in zip(now, carried, then, strict=True):
        one.add_incoming(first, begin)
        one.add_incoming(next_, loop)
    to.cbranch(to.icmp_signed("<", following, count), loop, end)
    to.position_at_end(end)
    return then


def _call(to: Any, name: str, *args: Any) -> Any:
    """LLVM's operation of that name on vectors."""
    full = f"llvm.{name}.v{LANES}f32"
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(args))
    return to.call(to.module.globals.get(full) or ir.Function(to.module, kind, full), args)


def _constant(number: float) -> Any:
    return ir.Constant(_VECTOR, [ir.Constant(_F32, float(number))] * LANES)


def _vector_at(to: Any, start: Any, offset: int) -> Any:
    return to.bitcast(to.gep(start, [ir.Constant(_I64, offset)]), _VECTOR.as_pointer())


def _broadcast(to: Any, scalar: Any) -> Any:
    one = to.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return to.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)


_one, _two, _three = (_block(vectors) for vectors in (1, 2, 3))


@njit(error_model="numpy")
def add_product(
    a: Any, a_row: Any, a_step: Any, b: Any, b_step: Any, depth: Any, c: Any, c_row: Any, rows: Any, columns: Any
) -> None:
    """`c[r, l] += sum over k < depth of a[r, k] * b[k, l]`, all float32. `rows` is a multiple of ROWS, `columns` of
    LANES. `a`, `b` and `c` are addresses. `a` has strides `a_row` and `a_step`, in elements; rows of `b` and `c` are
    `b_step` and `c_row` elements apart."""
    at = 0
    while at < columns:
        left = (columns - at) // LANES
        # Four vectors are better done as two and two than as three and one.
        vectors = 3 if left == 3 or left > 4 else min(left, 2)
        for row in range(0, rows, ROWS):
            x, y, z = a + row * a_row * 4, b + at * 4, c + (row * c_row + at) * 4
            if vectors == 3:
                _three(x, a_row, a_step, y, b_step, depth, z, c_row)
            elif vectors == 2:
                _two(x, a_row, a_step, y, b_step, depth, z, c_row)
            else:
                _one(x, a_row, a_step, y, b_step, depth, z, c_row)
        at += vectors * LANES
