"""Vectors of 32 lanes for numba: explicit SIMD.

The compiler does not vectorise a packing loop by itself, and if it may reorder a sum, the sum differs between
processors.  With these functions `load(x, i) + load(r, i)` is 32 additions in as few instructions as the processor
needs, and `add_up` always adds in the same order.  Masks are 32-bit words; lane 0 is the lowest bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, overload, register_model

LANES = 32

intrinsic: Any = extending.intrinsic  # A decorated function is called without its first argument.

_i1 = ir.IntType(1)
_i8 = ir.IntType(8)
_i32 = ir.IntType(32)
_f32 = ir.FloatType()
_floats = ir.VectorType(_f32, LANES)
_ints = ir.VectorType(_i32, LANES)
_mask = ir.VectorType(_i1, LANES)
_bytes = ir.VectorType(_i8, LANES)
_shorts = ir.VectorType(ir.IntType(16), LANES)
_halves = ir.VectorType(ir.HalfType(), LANES)


class Floats(types.Type):
    """32 float32 values."""

    def __init__(self) -> None:
        super().__init__("Floats")


class Ints(types.Type):
    """32 int32 values."""

    def __init__(self) -> None:
        super().__init__("Ints")


floats, ints = Floats(), Ints()


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _floats)


@register_model(Ints)
class _IntsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _ints)


def _address(context: Any, builder: Any, array: Any, value: Any, index: Any, kind: ir.Type) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _shuffled(builder: Any, vector: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_i32, len(order)), order))


def _widened(builder: Any, array: Any, values: Any) -> Any:
    """32 values of a type that `load` reads, as float32."""
    if array.dtype == types.float32:
        return values
    if array.dtype == types.uint16:
        return builder.fpext(values, _floats)
    upper = builder.zext(values, _ints)  # A bfloat16 is the upper half of a float32.
    return builder.bitcast(builder.shl(upper, _constant(_ints, 16)), _floats)


def _vector_of(array: Any) -> ir.VectorType:
    return {types.float32: _floats, types.uint16: _halves}.get(array.dtype, _shorts)


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """32 values from `index` on, as float32.  Pass float16 as uint16 and bfloat16 as int16: numba has neither type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, array, args[0], args[1], _vector_of(array))
        return _widened(builder, array, builder.load(at, align=array.dtype.bitwidth // 8))

    return floats(array, types.intp), generate


@intrinsic
def load_some(_: Any, array: Any, index: Any, mask: Any) -> Any:
    """As `load`, but only the lanes whose bit in the mask is 1; the others are 0, and their memory is not read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _vector_of(array)
        at = _address(context, builder, array, args[0], args[1], kind)
        size = _i32(array.dtype.bitwidth // 8)
        given = [at, size, builder.bitcast(args[2], _mask), ir.Constant(kind, None)]
        name = {types.float32: "f32", types.uint16: "f16"}.get(array.dtype, "i16")
        return _widened(builder, array, _called(builder, f"llvm.masked.load.v{LANES}{name}.p0", kind, given))

    return floats(array, types.intp, types.uint32), generate


@intrinsic
def store_some(_: Any, array: Any, index: Any, values: Any, mask: Any) -> Any:
    """Store in a float32 array the lanes whose bit in the mask is 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, array, args[0], args[1], _floats)
        given = [args[2], at, _i32(4), builder.bitcast(args[3], _mask)]
        _called(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), given)
        return context.get_dummy_value()

    return types.void(types.Array(types.float32, 1, "C"), types.intp, values, types.uint32), generate


def _called(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """The result of one of LLVM's intrinsics."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def store(_: Any, array: Any, index: Any, values: Any) -> Any:
    """Store 32 values in an array of a type that `load` reads, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        short = args[2]
        if array.dtype == types.uint16:
            short = builder.fptrunc(short, _halves)
        elif array.dtype == types.int16:
            word = builder.bitcast(short, _ints)
            odd = builder.and_(builder.lshr(word, _constant(_ints, 16)), _constant(_ints, 1))
            word = builder.add(word, builder.add(odd, _constant(_ints, 0x7FFF)))
            short = builder.trunc(builder.lshr(word, _constant(_ints, 16)), _shorts)
        builder.store(
            short, _address(context, builder, array, args[0], args[1], short.type), align=array.dtype.bitwidth // 8
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, values), generate


@intrinsic
def full(_: Any, value: Any) -> Any:
    """One float32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_floats, ir.Undefined), args[0], _i32(0))
        return _shuffled(builder, first, [0] * LANES)

    return floats(types.float32), generate


@intrinsic
def select(_: Any, mask: Any, a: Any, b: Any) -> Any:
    """In each lane `a` if its bit in the mask is 1, otherwise `b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.bitcast(args[0], _mask), args[1], args[2])

    return a(types.uint32, a, b), generate


@intrinsic
def count(_: Any, mask: Any) -> Any:
    """How many bits of a mask are 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint32(types.uint32), generate


@intrinsic
def lowest(_: Any, mask: Any) -> Any:
    """The index of the lowest 1 in a mask, which must not be 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], _i1(1)), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic
def add_up(_: Any, values: Any) -> Any:
    """The sum of all lanes: the upper half is added to the lower one until one lane is left."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = args[0]
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            lower, upper = (_shuffled(builder, total, [*range(start, start + lanes)]) for start in (0, lanes))
            total = builder.fadd(lower, upper)
        return builder.extract_element(total, _i32(0))

    return types.float32(values), generate


def _binary(generate_from: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def apply(_: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return generate_from(builder, args[0], args[1])

        return a(a, b), generate

    return apply


def _unary(generate_from: Callable[[Any, Any], Any], result: types.Type) -> Any:
    @intrinsic
    def apply(_: Any, a: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return generate_from(builder, args[0])

        return result(a), generate

    return apply


def _compared(how: str) -> Any:
    @intrinsic
    def apply(_: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.fcmp_ordered(how, args[0], args[1]), _i32)

        return types.uint32(a, b), generate

    return apply


def _floor(builder: Any, a: Any) -> Any:
    return _called(builder, f"llvm.floor.v{LANES}f32", _floats, [a])


# Comparisons of lanes, as masks; false for NaN.
at_least = _compared(">=")
less = _compared("<")

# The smaller or larger value of each lane; if one is NaN, the second, for which processors have one instruction.
smaller = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
larger = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
larger_int = _binary(lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))

floor = _unary(_floor, floats)
to_ints = _unary(lambda builder, a: builder.fptosi(a, _ints), ints)  # Towards 0; undefined for values beyond int32.
to_floats = _unary(lambda builder, a: builder.sitofp(a, _floats), floats)
bits_of = _unary(lambda builder, a: builder.bitcast(a, _ints), ints)
with_bits = _unary(lambda builder, a: builder.bitcast(a, _floats), floats)


def _overload(operation: Callable[..., Any], of: type[types.Type], apply: Any) -> None:
    def of_two(a: Any, b: Any) -> Any:
        return apply(a, b)

    def of_one_and_a_number(a: Any, b: Any) -> Any:
        return apply(a, full_int(b))

    @overload(operation, strict=False)
    def choose(a: Any, b: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        if isinstance(a, of) and isinstance(b, of):
            return of_two
        return of_one_and_a_number if isinstance(a, of) and of is Ints and isinstance(b, types.Integer) else None


for _operation, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _overload(_operation, Floats, _binary(lambda builder, a, b, name=_name: getattr(builder, name)(a, b)))
for _operation, _name in (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
    (operator.xor, "xor"),
    (operator.and_, "and_"),
    (operator.or_, "or_"),
    (operator.lshift, "shl"),
    (operator.rshift, "lshr"),  # Unsigned.
):
    _overload(_operation, Ints, _binary(lambda builder, a, b, name=_name: getattr(builder, name)(a, b)))


@intrinsic
def full_int(_: Any, value: Any) -> Any:
    """The lower 32 bits of an integer in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_ints, ir.Undefined), builder.trunc(args[0], _i32), _i32(0))
        return _shuffled(builder, first, [0] * LANES)

    return ints(types.int64), generate


@intrinsic
def numbered(_: Any) -> Any:
    """The lanes' indices, 0 to 31."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_ints, [*range(LANES)])

    return ints(), generate


@intrinsic
def largest(_: Any, values: Any) -> Any:
    """The largest of 32 integers, as the float32 with the same bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        most = args[0]
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            lower, upper = (_shuffled(builder, most, [*range(start, start + lanes)]) for start in (0, lanes))
            most = builder.select(builder.icmp_signed(">", lower, upper), lower, upper)
        return builder.bitcast(builder.extract_element(most, _i32(0)), _f32)

    return types.float32(values), generate


def _stored(kind: ir.VectorType, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def apply(_: Any, array: Any, index: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(convert(builder, args[2]), _address(context, builder, array, args[0], args[1], kind), align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, values), generate

    return apply


def _loaded(kind: ir.VectorType, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def apply(_: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return convert(builder, builder.load(_address(context, builder, array, args[0], args[1], kind), align=1))

        return ints(array, types.intp), generate

    return apply


def _folded(per_byte: int) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Functions that pack codes of 8 // per_byte bits into bytes, the first code lowest, and unpack them.

    The codes of one byte lie in the bytes of one word, and are shifted together; a truncation or a mask removes the
    rest.
    """
    bits = 8 // per_byte
    words = ir.VectorType(ir.IntType(8 * per_byte), LANES // per_byte)
    mask = sum((1 << bits) - 1 << 8 * i for i in range(per_byte))

    def fold(builder: Any, codes: Any) -> Any:
        word = builder.bitcast(builder.trunc(codes, _bytes), words)
        total = word
        for i in range(1, per_byte):
            total = builder.or_(total, builder.lshr(word, _constant(words, i * (8 - bits))))
        return builder.trunc(total, ir.VectorType(_i8, LANES // per_byte))

    def unfold(builder: Any, packed: Any) -> Any:
        word = builder.zext(packed, words)
        total = word
        for i in range(1, per_byte):
            total = builder.or_(total, builder.shl(word, _constant(words, i * (8 - bits))))
        return builder.zext(builder.bitcast(builder.and_(total, _constant(words, mask)), _bytes), _ints)

    return fold, unfold


# Store and load 32 codes of 2, 4, 8 or 16 bits in an array of bytes, from a byte index on.
_quarter = ir.VectorType(_i8, LANES // 4)
_half = ir.VectorType(_i8, LANES // 2)
store_16 = _stored(_shorts, lambda b, v: b.trunc(v, _shorts))
load_16 = _loaded(_shorts, lambda b, v: b.zext(v, _ints))
store_8 = _stored(_bytes, lambda b, v: b.trunc(v, _bytes))
load_8 = _loaded(_bytes, lambda b, v: b.zext(v, _ints))
store_4 = _stored(_half, _folded(2)[0])
load_4 = _loaded(_half, _folded(2)[1])
store_2 = _stored(_quarter, _folded(4)[0])
load_2 = _loaded(_quarter, _folded(4)[1])
