"""What kernels/fours.py stands for, in Numba's compiler: vectors of four elements in LLVM."""

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

LANES = [ir.Constant(ir.IntType(32), n) for n in range(4)]


def _vector(context: Any, builder: Any, array: Any, memory: Any, index: Any) -> tuple[Any, int]:
    """Return the address of four elements as that of a vector, and its alignment in bytes."""
    data = context.make_array(array)(context, builder, memory).data
    four = ir.VectorType(context.get_data_type(array.dtype), 4)
    place = builder.bitcast(builder.gep(data, [index]), four.as_pointer())
    return place, min(16, 4 * array.dtype.bitwidth // 8)


def read() -> Any:
    """Return a function from an array and an index to four elements."""

    def typed(_: Any, array: Any, index: Any) -> Any:
        result = types.UniTuple(array.dtype, 4)

        def emit(context: Any, builder: Any, _: Any, given: Any) -> Any:
            place, bytes_ = _vector(context, builder, array, *given)
            found = builder.load(place)
            found.align = bytes_
            parts = [builder.extract_element(found, lane) for lane in LANES]
            return context.make_tuple(builder, result, parts)

        return result(array, index), emit

    return intrinsic(typed)


def write() -> Any:
    """Return a function that writes four elements of an array at an index."""

    def typed(_: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def emit(context: Any, builder: Any, _: Any, given: Any) -> Any:
            place, bytes_ = _vector(context, builder, array, given[0], given[1])
            four = ir.Constant(place.type.pointee, ir.Undefined)
            for lane, value in zip(LANES, given[2:], strict=True):
                four = builder.insert_element(four, value, lane)
            builder.store(four, place).align = bytes_
            return context.get_dummy_value()

        kind = array.dtype
        return types.void(array, index, kind, kind, kind, kind), emit

    return intrinsic(typed)
