"""A process group: one duplicated communicator, its sequence numbers, plans and counters.

Every collective of the group ends in `start`: it finds or compiles the plan for this call, gives it
a tag, and runs it.  The path of a call is

    collectives.py (what goes where)  ->  ProcessGroup.start  ->  plan.py  ->  run.py (Isend, Irecv)
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpipar import schedule as schedules
from mpipar.arrays import is_sixteen_bit
from mpipar.comm import abort, choice, library, node, waiting
from mpipar.comm.flight import Flight, Record
from mpipar.comm.plan import Layout, Plan, compile_plan
from mpipar.comm.run import Execution, Persistent, Requests, ScratchPool
from mpipar.comm.small import Key, SmallReduce
from mpipar.errors import ConfigError, DestroyedError, DtypeMismatchError, explain
from mpipar.kernels.reduce import COMBINE, fold
from mpipar.partition import blocks, offsets

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
PERSISTENT_BYTES = 32768  # calls up to this size run on prepared requests
PERSISTENT_RANKS = 64
KEEP_PREPARED = 512  # calls whose plans are kept
# Tags: 0 the watchdogs, 1 send and recv, then persistent plans by signature, then the sequence.
MESSAGE_TAG, PERSISTENT_TAG, SEQUENCE_TAG = 1, 16, 8192


class Call(NamedTuple):
    """What all ranks of the group must agree on.

    `sizes` are the elements of each block (of the whole vector for all_reduce, broadcast, reduce).
    """

    collective: str
    algorithm: str
    op: Any  # a name of COMBINE, a UserOp, or None
    dtype: np.dtype
    sizes: tuple[int, ...]
    root: int = 0
    offset: int = 1


@dataclass(eq=False, frozen=True)
class UserOp:
    """A user's MPI.Op, for one call: its handle may mean another operation later."""

    op: MPI.Op

    def __str__(self) -> str:
        return "MPI.Op"


@dataclass(slots=True)
class Prepared:
    """A compiled call, kept for the next one like it."""

    algorithm: str
    what: str
    signature: int
    sizes: Sequence[int]
    plan: Plan | None = None
    persistent: Persistent | None = None
    fold: Callable = fold
    divisor: int = 1


@dataclass(slots=True)
class _Fold:
    """The addition of one reduction, as `run` calls it."""

    combine: np.ufunc | None
    ufunc: np.ufunc = field(default=np.add)

    def __call__(self, operands: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> None:
        fold(self.ufunc, operands, out, divisor)


class ProcessGroup:
    """See the module.  The constructor is collective over `raw`."""

    def __init__(
        self,
        raw: MPI.Comm,
        name: str = "",
        algorithm: str = "auto",
        reproducible: bool = False,
        check: bool = False,
        timeout: float = 600.0,
        segment_bytes: int | None = None,
    ) -> None:
        self._validate(algorithm, timeout, segment_bytes)
        self.raw = raw.Dup()
        self.raw.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.raw.rank, self.raw.size
        self.name = name or f"{self.size} ranks"
        self.algorithm, self.reproducible, self.check = algorithm, reproducible, check
        self.timeout, self.segment_bytes = timeout, segment_bytes
        self.nodes = node.discover(self.raw)
        node.set_blas_threads(self.nodes)
        waiting.set_oversubscribed(node.local_ranks(self.nodes) > node.cores())
        abort.install()
        self.table = self._agree_table()
        self.flight = Flight(self.raw, self.name, timeout)
        self.calls: Counter[str] = Counter()
        self.seconds = 0.0
        self.sequence = 0
        self.destroyed = False
        self._pool = ScratchPool()
        self._prepared: dict[Call, Prepared] = {}
        self.small: dict[Key, SmallReduce] = {}

    @staticmethod
    def _validate(algorithm: str, timeout: float, segment_bytes: int | None) -> None:
        known = {name for collective in schedules.generators for name in algorithms(collective)}
        if algorithm != "auto" and algorithm not in known:
            choices = ", ".join(["auto", *sorted(known)])
            raise ConfigError(explain("algorithm", algorithm, "not known", f"One of: {choices}"))
        if not timeout > 0:
            raise ConfigError(explain("timeout", timeout, "it is positive seconds", "Pass 600.0"))
        if segment_bytes is not None and segment_bytes < 1:
            raise ConfigError(explain("segment_bytes", segment_bytes, "at least 1", "Pass None"))

    def _agree_table(self) -> choice.Table:
        if self.size == 1:
            return choice.Table({})
        return self.raw.bcast(
            choice.read_table(choice.table_path()) if self.rank == 0 else None, root=0
        )

    def destroy(self) -> None:
        """Free everything of MPI; collective; a second call does nothing."""
        if self.destroyed:
            return
        self.destroyed = True
        self.flight.close()
        while self._prepared:
            self._forget()
        self.small.clear()
        self.raw.Free()

    # -- running ---------------------------------------------------------------------------------

    def start(
        self,
        call: Call,
        source: np.ndarray,
        output: np.ndarray,
        finish: Callable[[], Any],
        async_op: bool = False,
    ) -> Any:
        """Run a call from the flat `source` to the flat `output`; return the result or a handle."""
        begin = time.perf_counter()
        prepared = self._prepared.get(call)
        if prepared is None:
            prepared = self.prepare(call)
        self.sequence += 1
        self.calls[call.collective] += 1
        record = self.flight.note(Record(self.sequence, prepared.what))
        persistent = prepared.persistent
        if persistent is not None and not async_op:
            persistent.input[:] = source
            persistent.run()
            output[:] = persistent.output
            result = finish()
            self.seconds += time.perf_counter() - begin
            return result
        handle = self._launch(call, prepared, source, output, finish)
        record.handle = handle
        if async_op:
            self.seconds += time.perf_counter() - begin
            return Handle(handle, self)
        result = handle.wait()
        self.seconds += time.perf_counter() - begin
        return result

    def _launch(
        self,
        call: Call,
        prepared: Prepared,
        source: np.ndarray,
        output: np.ndarray,
        finish: Callable[[], Any],
    ) -> Execution | Requests:
        if prepared.plan is None:
            request = library.start(
                self.raw, call.collective, source, output, prepared.sizes, call.op, call.root
            )
            if prepared.divisor != 1:
                finish = _dividing(output, prepared.divisor, finish)
            return Requests([request], self.flight, finish, "inside the MPI library")
        tag = SEQUENCE_TAG + ((self.sequence & 0x3FFF) << 8) + (prepared.signature & 0xFF)
        return Execution(
            self.raw,
            prepared.plan,
            source,
            output,
            tag,
            prepared.fold,
            prepared.divisor,
            self._pool,
            self.flight,
            finish,
        )

    # -- preparing -------------------------------------------------------------------------------

    def prepare(self, call: Call) -> Prepared:
        """Choose the algorithm and compile the plan of a call, once."""
        if self.destroyed:
            raise DestroyedError(f"communicator {self.name!r} was destroyed; make a new one")
        nbytes = sum(call.sizes) * call.dtype.itemsize
        algorithm = self.validate(call)
        what = self._describe(call, algorithm)
        prepared = Prepared(algorithm, what, zlib.crc32(what.encode()), call.sizes)
        prepared.divisor = self.size if call.op == "mean" else 1
        if algorithm != "mpi":
            self._compile(call, prepared, nbytes)
        if isinstance(call.op, UserOp):
            return prepared
        if len(self._prepared) >= KEEP_PREPARED:
            self._forget()
        self._prepared[call] = prepared
        return prepared

    def _forget(self) -> None:
        """Drop the oldest prepared call."""
        call = next(iter(self._prepared))
        prepared = self._prepared.pop(call)
        if prepared.persistent is not None:
            prepared.persistent.free()
            for key in [k for k, small in self.small.items() if small.of(prepared.persistent)]:
                del self.small[key]

    def validate(self, call: Call) -> str:
        """Return the algorithm of a call.

        Raises ConfigError or DtypeMismatchError if the algorithm or operation does not fit.
        """
        self._check_op(call)
        return self._algorithm(call, sum(call.sizes) * call.dtype.itemsize)

    def _compile(self, call: Call, prepared: Prepared, nbytes: int) -> None:
        made = schedules.make(
            call.collective,
            prepared.algorithm,
            self.size,
            root=call.root,
            offset=call.offset,
            nodes=self.nodes.sizes if prepared.algorithm == "hierarchical" else None,
        )
        sizes = self._block_sizes(call, made.blocks)
        parts = choice.segments(max(sizes, default=0) * call.dtype.itemsize, self.segment_bytes)
        if parts > 1 and made.reduced:
            made = schedules.segment(made, parts)
        layout = _layout(made, self.rank, sizes)
        plan = prepared.plan = compile_plan(made, self.rank, layout)
        prepared.fold = _make_fold(call)
        small = nbytes <= PERSISTENT_BYTES and self.size <= PERSISTENT_RANKS
        if small and not isinstance(call.op, UserOp):
            tag = PERSISTENT_TAG + prepared.signature % (SEQUENCE_TAG - PERSISTENT_TAG)
            prepared.persistent = Persistent(
                self.raw, plan, call.dtype, tag, prepared.fold, prepared.divisor, self.flight
            )
            if call.collective == "all_reduce" and not self.check and isinstance(call.op, str):
                self._shorten(call, prepared, prepared.persistent)

    def _shorten(self, call: Call, prepared: Prepared, persistent: Persistent) -> None:
        """Let the next call like this one take the short way, whether it names the algorithm."""
        small = SmallReduce(self, prepared, persistent)
        self.small[call.op, call.algorithm, call.dtype, call.sizes[0]] = small
        if call.algorithm == self.algorithm:
            self.small[call.op, None, call.dtype, call.sizes[0]] = small

    def _block_sizes(self, call: Call, count: int) -> tuple[int, ...]:
        if call.collective in ("all_reduce", "broadcast", "reduce"):
            return blocks(call.sizes[0], count)
        return call.sizes

    def _describe(self, call: Call, algorithm: str) -> str:
        sizes = call.sizes[0] if len(set(call.sizes)) == 1 else call.sizes
        op = f", op={call.op}" if call.op is not None else ""
        root = (
            f", root={call.root}"
            if call.collective in ("broadcast", "gather", "scatter", "reduce")
            else ""
        )
        return f"{call.collective}({call.dtype.name}, {sizes} elements{op}{root}) by {algorithm}"

    def _algorithm(self, call: Call, nbytes: int) -> str:
        """Return the algorithm that the rules and the caller allow.

        Raises ConfigError for an unknown one, or one that the dtype or `reproducible` forbids.
        """
        wanted = call.algorithm
        reduces = call.collective in REDUCTIONS
        ordered = reduces and (
            self.reproducible or is_sixteen_bit(call.dtype) or isinstance(call.op, UserOp)
        )
        known = algorithms(call.collective)
        if wanted == "auto" or (wanted == self.algorithm and wanted not in known):
            if ordered:
                return "linear" if call.collective == "reduce" else "direct"
            if self.size == 1 and "mpi" in known and call.collective != "barrier":
                return known[0]
            return choice.choose(call.collective, nbytes, self.size, self.nodes, self.table)
        if wanted not in known:
            raise ConfigError(
                explain(
                    "algorithm",
                    wanted,
                    f"{call.collective} does not have it",
                    f"Choose one of: auto, {', '.join(known)}",
                )
            )
        if (
            ordered
            and wanted not in ("direct", "linear")
            and not (isinstance(call.op, UserOp) and wanted == "mpi" and not self.reproducible)
        ):
            why = "reproducible=True" if self.reproducible else f"{call.dtype.name}, op {call.op}"
            raise ConfigError(
                explain(
                    "algorithm",
                    wanted,
                    f"this reduction ({why}) adds all contributions at once in rank order",
                    'Use "auto" or "direct" ("linear" for reduce)',
                )
            )
        return wanted

    def _check_op(self, call: Call) -> None:
        if call.op is None or isinstance(call.op, UserOp):
            return
        if call.op not in COMBINE:
            raise ConfigError(
                explain("op", call.op, "not known", f"One of: {', '.join(COMBINE)}, or an MPI.Op")
            )
        if call.op == "mean" and call.dtype.kind in "biu":
            raise DtypeMismatchError(
                explain("op", "mean", f"{call.dtype} has no fractions", 'Use "sum", or a float')
            )
        if call.dtype.kind == "c" and call.op in ("max", "min"):
            raise DtypeMismatchError(
                explain("op", call.op, "complex numbers have no order", 'Use "sum"')
            )


class Handle:
    """A collective in flight: `test()` advances it, `wait()` returns its result."""

    __slots__ = ("_group", "_inner")

    def __init__(self, inner: Execution | Requests, group: ProcessGroup) -> None:
        self._inner, self._group = inner, group

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        return self._inner.test()

    def wait(self) -> Any:
        """Wait for the result and return it; a second call returns it again."""
        begin = time.perf_counter()
        result = self._inner.wait()
        self._group.seconds += time.perf_counter() - begin
        return result


def algorithms(collective: str) -> tuple[str, ...]:
    """Return the names that `algorithm=` takes for a collective, besides "auto".

    Raises ConfigError for an unknown collective.
    """
    own = schedules.algorithms(collective)
    return (*own, "mpi") if collective in library.COLLECTIVES else own


def _layout(made: schedules.CommSchedule, rank: int, sizes: Sequence[int]) -> Layout:
    """Blocks lie one behind the other, in ascending order, in the input and in the output."""
    parts = made.parts

    def starts(chunks: list[int]) -> dict[int, int]:
        held = [chunk // parts for chunk in chunks[::parts]]
        return dict(zip(held, offsets([sizes[b] for b in held]), strict=True))

    if made.collective in ("all_reduce", "broadcast", "reduce"):
        everywhere = dict(enumerate(offsets(sizes)))
        return Layout(sizes, everywhere, everywhere)
    return Layout(sizes, starts(made.initial(rank)), starts(made.final(rank)))


def _make_fold(call: Call) -> Callable:
    if isinstance(call.op, UserOp):
        return _user_fold(call.op.op)
    ufunc = COMBINE[call.op or "sum"]
    return _Fold(None if is_sixteen_bit(call.dtype) else ufunc, ufunc)


def _user_fold(op: MPI.Op) -> Callable:
    """Return the fold of a user's MPI.Op: ((x_0 op x_1) op x_2) ..."""

    def run(operands: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> None:
        total = operands[0]
        for operand in operands[1:]:
            following = operand.copy()
            op.Reduce_local(total, following)
            total = following
        np.copyto(out, total)

    return run


def _dividing(output: np.ndarray, divisor: int, finish: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        np.divide(output, divisor, out=output)
        return finish()

    return run
