"""What kernels/ptx.py stands for, in Numba's compiler: intrinsics that emit PTX."""

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic as numba_intrinsic

from mpipar.kernels.ptx import Instruction

LLVM = {
    "float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType(),
    "int32": ir.IntType(32), "uint32": ir.IntType(32), "uint16": ir.IntType(16),
    "int64": ir.IntType(64), "uint64": ir.IntType(64),
}  # fmt: skip


def _type(name: str) -> Any:
    """Return Numba's type: "float32*64" is a tuple of 64."""
    one, _, count = name.partition("*")
    return types.UniTuple(getattr(types, one), int(count)) if count else getattr(types, one)


def _operands(names: list[str]) -> list[Any]:
    """Return LLVM's types, those in tuples one by one."""
    pairs = (name.partition("*") for name in names)
    return [LLVM[one] for one, _, count in pairs for _ in range(int(count or 1))]


def intrinsic(one: Instruction) -> Any:
    """Return a function that kernels call, which emits one instruction."""
    gives = [_type(name) for name in one.gives]
    takes = [_type(name) for name in one.takes]
    plain, given = _operands(one.gives), _operands(one.takes)
    many = types.BaseTuple.from_types(gives)
    result = types.void if not gives else gives[0] if len(gives) == 1 else many
    signature = result(*takes)

    def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        gets = ir.VoidType() if not plain else plain[0]
        gets = gets if len(plain) < 2 else ir.LiteralStructType(plain)
        shape = ir.FunctionType(gets, given)
        flat = []
        for value, kind in zip(arguments, takes, strict=True):
            each = range(kind.count) if isinstance(kind, types.UniTuple) else ()
            flat += [builder.extract_value(value, n) for n in each] or [value]
        effect = one.memory or not plain
        code = ir.InlineAsm(shape, one.text, one.constraints, side_effect=effect)
        value = builder.call(code, flat, attrs=("convergent",) * one.warp)
        if not plain:
            return context.get_dummy_value()
        if len(plain) == 1:
            return value
        parts = [builder.extract_value(value, n) for n in range(len(plain))]
        return context.make_tuple(builder, result, parts)

    names = ", ".join(f"a{n}" for n in range(len(takes)))
    space: dict[str, Any] = {"signature": signature, "emit": emit}
    exec(f"def typed(context, {names}): return signature, emit", space)  # one name an argument
    return numba_intrinsic(space["typed"])


def address_of(shared: bool) -> Any:
    """Return a function from an array and an index to the element's address."""

    def typed(_: Any, array: Any, index: Any) -> Any:
        signature = (types.uint32 if shared else types.uint64)(array, index)

        def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            place = builder.gep(data, [arguments[1]])
            number = builder.ptrtoint(place, ir.IntType(64))
            if not shared:
                return number
            text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
            shape = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
            return builder.call(ir.InlineAsm(shape, text, "=r,l"), [number])

        return signature, emit

    return numba_intrinsic(typed)


def quad_of() -> Any:
    """Return a function from an array and an index to four elements, read 16 bytes at a time."""

    def typed(_: Any, array: Any, index: Any) -> Any:
        result = types.UniTuple(array.dtype, 4)
        signature = result(array, index)

        def emit(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            place = builder.gep(data, [arguments[1]])
            element = LLVM[str(array.dtype)]
            vector = builder.bitcast(place, ir.VectorType(element, 4).as_pointer())
            read = builder.load(vector)
            read.align = min(16, 4 * array.dtype.bitwidth // 8)
            parts = [
                builder.extract_element(read, ir.Constant(ir.IntType(32), n)) for n in range(4)
            ]
            return context.make_tuple(builder, result, parts)

        return signature, emit

    return numba_intrinsic(typed)
