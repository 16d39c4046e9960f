"""Intrinsics that numba lacks for memory shared by processes: compare-and-swap, add, prefetch, match.

Each works on one element of a flat array, without bounds checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types
from numba.core import cgutils

intrinsic: Any = extending.intrinsic
"""Typed as the code generator sees it, not as a kernel calls it."""


def _element(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Return the address of array[index]."""
    made = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, made, [index], wraparound=False)


def emit_prefetch(context: Any, builder: Any, pointer: Any, *, write: bool) -> Any:
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    numbers = [ir.Constant(number, n) for n in (int(write), 3, 1)]  # keep it close, data
    builder.call(function, [builder.bitcast(pointer, byte), *numbers])
    return context.get_dummy_value()


@intrinsic
def swap(typing: Any, array: Any, index: Any, old: Any, new: Any) -> tuple[Any, Callable[..., Any]]:
    """swap(array, index, old, new) -> what was there; it was swapped if that is `old`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature.args[0], args[0], args[1])
        # Release: a thread that sees the new value also sees everything written before it.
        result = builder.cmpxchg(place, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(result, 0)

    return array.dtype(array, types.intp, array.dtype, array.dtype), code


@intrinsic
def add(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """add(array, index, value) -> what was there before."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", place, args[2], "monotonic")

    return array.dtype(array, types.intp, array.dtype), code


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """prefetch(array, index): fetch the cache line of that element into the cache."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature.args[0], args[0], args[1])
        return emit_prefetch(context, builder, place, write=False)

    return types.void(array, types.intp), code


@intrinsic
def match(typing: Any, array: Any, index: Any, half: Any) -> tuple[Any, Callable[..., Any]]:
    """match(array, index, half) -> bit j: the upper half of array[index + j], j below 8, is `half`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _element(context, builder, signature.args[0], args[0], args[1])
        eight = ir.VectorType(ir.IntType(64), 8)
        loaded = builder.load(builder.bitcast(place, eight.as_pointer()))
        loaded.align = 8
        shifts = ir.Constant(eight, [32] * 8)
        wanted: Any = ir.Constant(eight, ir.Undefined)
        for j in range(8):
            wanted = builder.insert_element(wanted, args[2], ir.Constant(ir.IntType(32), j))
        same = builder.icmp_unsigned("==", builder.lshr(loaded, shifts), wanted)
        return builder.zext(builder.bitcast(same, ir.IntType(8)), ir.IntType(64))

    return types.int64(array, types.intp, types.uint64), code


@intrinsic
def lowest(typing: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """lowest(bits) -> the index of the lowest set bit."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code
