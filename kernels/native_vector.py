"""What the compiler of loops takes for the products of kernels/native_product.py, in LLVM's terms.

A block of C stays in vector registers while a loop runs over the depth.  Each step loads a row of
B's block, and multiplies it by one number of each row of A:

    AVX-512: 8 rows of 2 vectors of 16 numbers, 16 of 32 registers    others: 4 rows of 2 of 8
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from mpipar.kernels import native_product
from mpipar.kernels.native_product import NARROW, ROWS, WIDE

FLOAT, INDEX = ir.FloatType(), ir.IntType(64)


def register(large: bool) -> None:
    """Tell Numba of the products; large: the CPU has 32 registers of 16 numbers."""
    rows, lanes = (8, 16) if large else (4, 8)
    for function, columns in ((native_product.wide, WIDE), (native_product.narrow, NARROW)):
        _register(function, columns, rows, lanes)


def _register(function: Any, columns: int, rows: int, lanes: int) -> None:
    vectors = min(2, columns // lanes)

    @intrinsic
    def product(  # type: ignore[no-untyped-def]
        typing, c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add
    ):
        pointer, index = types.CPointer(types.float32), types.intp
        signature = types.void(
            *[pointer, index, index], *[pointer, *[index] * 3], *[pointer, index, index],
            *[index, types.boolean],
        )  # fmt: skip

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add = arguments
            for r in range(0, ROWS, rows):
                for j in range(0, columns, lanes * vectors):
                    block = _Block(builder, rows, vectors, lanes)
                    block.c = builder.add(c_at, _times(builder, c_step, r)), c_step, j
                    block.a = builder.add(a_at, _times(builder, a_row, r)), a_row, a_col
                    block.b = b_at, b_step, j
                    block.emit(c, a, b, depth, add)
            return context.get_dummy_value()

        return signature, generate

    @overload(function, inline="never")
    def chosen(  # type: ignore[no-untyped-def]
        c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add
    ):
        def call(  # type: ignore[no-untyped-def]
            c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add
        ):
            product(c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add)

        return call


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(INDEX, factor))


class _Block:
    """The product of some rows of A and some vectors of B's rows, whose sums fit the registers."""

    c: tuple[Any, Any, int]  # where it begins, step of a row, column
    a: tuple[Any, Any, Any]  # where it begins, step of a row, step of a column
    b: tuple[Any, Any, int]  # where it begins, step of a row, column

    def __init__(self, builder: Any, rows: int, vectors: int, lanes: int) -> None:
        self.builder, self.rows, self.vectors, self.lanes = builder, rows, vectors, lanes
        self.kind = ir.VectorType(FLOAT, lanes)

    def emit(self, c: Any, a: Any, b: Any, depth: Any, add: Any) -> None:
        """Write the instructions."""
        builder, zero = self.builder, ir.Constant(self.kind, [0.0] * self.lanes)
        places = [
            self._vector(c, builder.add(self.c[0], _times(builder, self.c[1], r)), self.c[2], u)
            for r in range(self.rows)
            for u in range(self.vectors)
        ]
        first = [builder.select(add, builder.load(p, align=4), zero) for p in places]
        before, body, after = (builder.append_basic_block(n) for n in ("before", "body", "after"))
        starts = builder.block
        builder.branch(before)
        builder.position_at_end(before)
        step = builder.phi(INDEX)
        step.add_incoming(ir.Constant(INDEX, 0), starts)
        sums = [builder.phi(self.kind) for _ in places]
        for total, value in zip(sums, first, strict=True):
            total.add_incoming(value, starts)
        builder.cbranch(builder.icmp_signed("<", step, depth), body, after)
        builder.position_at_end(body)
        news = self._step(a, b, step, sums)
        step.add_incoming(builder.add(step, ir.Constant(INDEX, 1)), builder.block)
        for total, value in zip(sums, news, strict=True):
            total.add_incoming(value, builder.block)
        builder.branch(before)
        builder.position_at_end(after)
        for place, total in zip(places, sums, strict=True):
            builder.store(total, place, align=4)

    def _step(self, a: Any, b: Any, step: Any, sums: list[Any]) -> list[Any]:
        """Return the sums with one more term each."""
        builder, news = self.builder, []
        row = builder.add(self.b[0], builder.mul(self.b[1], step))
        right = [
            builder.load(self._vector(b, row, self.b[2], u), align=4) for u in range(self.vectors)
        ]
        column = builder.add(self.a[0], builder.mul(self.a[2], step))
        name = f"llvm.fmuladd.v{self.lanes}f32"
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(self.kind, [self.kind] * 3), name
        )
        for r in range(self.rows):
            at = builder.add(column, _times(builder, self.a[1], r))
            left = self._spread(builder.load(builder.gep(a, [at]), align=4))
            for u in range(self.vectors):
                news.append(builder.call(fma, [left, right[u], sums[r * self.vectors + u]]))
        return news

    def _spread(self, number: Any) -> Any:
        """Return a vector of one number."""
        none = ir.Constant(self.kind, ir.Undefined)
        one = self.builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, none, mask)

    def _vector(self, base: Any, row: Any, column: int, u: int) -> Any:
        """Return a pointer to a vector in a row."""
        at = self.builder.add(row, ir.Constant(INDEX, column + u * self.lanes))
        return self.builder.bitcast(self.builder.gep(base, [at]), self.kind.as_pointer())
