"""SIMD vectors of 16 floats for numba.

A loop vectorizer chooses width and unrolling itself, and leaves the remainder (4 of 100 columns, or 36) to
scalar instructions. With these intrinsics a kernel decides: load 16 floats, multiply and add, keep a dozen
sums in registers, and turn them into 16 lanes of one vector by a tree of shuffles. LLVM makes one AVX-512
instruction of each, two of AVX, four of NEON: the code is the same on all.

Addresses are plain integers, in bytes. Keep the array alive while its address is used: numba frees an array
after the last line that names it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

from manyhands.embeddings.atomics import emit_prefetch

intrinsic: Any = extending.intrinsic
"""Typed as the code generator sees it, not as a kernel calls it."""

LANES = 16
BYTES = 4 * LANES

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_INT32 = ir.IntType(32)
_INT32S = ir.VectorType(_INT32, LANES)
_ALIGN = 4
"""Rows may start at any float."""


class Vector(types.Type):
    """16 floats in registers."""

    def __init__(self) -> None:
        super().__init__(name="Vector16")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _spread(builder: Any, value: Any, vector_type: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, _INT32(0))
    zeros = ir.Constant(_INT32S, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), zeros)


def _first(builder: Any, count: Any) -> Any:
    """Return a mask of the first `count` lanes."""
    lanes = ir.Constant(_INT32S, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _spread(builder, builder.trunc(count, _INT32), _INT32S))


@intrinsic
def address_of(typing: Any, array: Any) -> Any:
    """Return the address of the first element of an array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """Return a vector with this number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0], _VECTOR)

    return vector(types.float32), generate


@intrinsic
def splat_at(typing: Any, address: Any) -> Any:
    """Return a vector with the float at this address in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_pointer(builder, args[0], _FLOAT), align=_ALIGN, typ=_FLOAT)
        return _spread(builder, value, _VECTOR)

    return vector(types.int64), generate


@intrinsic
def load(typing: Any, address: Any, count: Any) -> Any:
    """Load 16 floats. With a number instead of None: the first `count`, and zeros in the other lanes; no byte
    beyond them is read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _VECTOR)
        if count is types.none:
            return builder.load(pointer, align=_ALIGN, typ=_VECTOR)
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        name = "llvm.masked.load.v16f32.p0"
        read = _declare(builder, name, _VECTOR, [pointer.type, _INT32, _MASK, _VECTOR])
        return builder.call(read, [pointer, _INT32(_ALIGN), _first(builder, args[1]), nothing])

    return vector(types.int64, _count(count)), generate


@intrinsic
def store(typing: Any, address: Any, value: Any, count: Any) -> Any:
    """Store 16 floats, or with a number instead of None only the first `count`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _VECTOR)
        if count is types.none:
            builder.store(args[1], pointer, align=_ALIGN)
        else:
            kinds = [_VECTOR, pointer.type, _INT32, _MASK]
            write = _declare(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), kinds)
            builder.call(write, [args[1], pointer, _INT32(_ALIGN), _first(builder, args[2])])
        return context.get_dummy_value()

    return types.none(types.int64, vector, _count(count)), generate


def _count(given: Any) -> Any:
    return types.none if given is types.none else types.int64


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line of an address for writing, exclusively for this core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.IntType(8))
        return emit_prefetch(context, builder, pointer, write=True)

    return types.none(types.int64), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c by lane: one instruction if the processor has it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(_declare(builder, "llvm.fmuladd.v16f32", _VECTOR, [_VECTOR] * 3), args)

    return vector(vector, vector, vector), generate


def _by_lane(instruction: str) -> Any:
    """Make an intrinsic of two vectors from an instruction of LLVM."""

    @intrinsic
    def combine(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return vector(vector, vector), generate

    return combine


add = _by_lane("fadd")
subtract = _by_lane("fsub")
multiply = _by_lane("fmul")
divide = _by_lane("fdiv")


@intrinsic
def clip(typing: Any, value: Any, limit: Any) -> Any:
    """Clamp each lane to [-limit, limit]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, limit = args[0], _spread(builder, args[1], _VECTOR)
        low = builder.fsub(ir.Constant(_VECTOR, [0.0] * LANES), limit)
        value = builder.select(builder.fcmp_ordered("<", value, limit), value, limit)
        return builder.select(builder.fcmp_ordered(">", value, low), value, low)

    return vector(vector, types.float32), generate


@intrinsic
def sums(typing: Any, vectors: Any) -> Any:
    """Return a vector whose lane i is the sum of vector i; lanes beyond the given vectors are 0.

    Two vectors are folded into one by adding their interleaved halves, four times: under three instructions
    per sum, where summing each vector alone would take eight.
    """
    if not isinstance(vectors, types.UniTuple) or vectors.dtype != vector or len(vectors) > LANES:
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        rows: list[Any] = [builder.extract_value(args[0], i) for i in range(len(vectors))]
        rows += [None] * (LANES - len(rows))
        width = LANES
        while len(rows) > 1:
            width //= 2
            half = len(rows) // 2
            # After the fold, a run of `width` lanes belongs to the first and the next to the second.
            lows = [_taken(i, width, 0) for i in range(LANES)]
            highs = [_taken(i, width, 1) for i in range(LANES)]
            folded: list[Any] = []
            for first, second in zip(rows[:half], rows[half:], strict=True):
                if first is None and second is None:
                    folded.append(None)
                    continue
                first, second = first or nothing, second or nothing
                low = builder.shuffle_vector(first, second, ir.Constant(_INT32S, lows))
                high = builder.shuffle_vector(first, second, ir.Constant(_INT32S, highs))
                folded.append(builder.fadd(low, high))
            rows = folded
        return rows[0]

    return vector(vectors), generate


def _taken(lane: int, width: int, half: int) -> int:
    """Return which lane of (first, second) goes to `lane` when runs of 2 * width are folded in half."""
    run, offset = divmod(lane, 2 * width)
    which, inside = divmod(offset, width)
    return which * LANES + run * 2 * width + half * width + inside
