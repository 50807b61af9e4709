"""A process group: one duplicated communicator, its sequence numbers, plans and counters.

Every collective of the group ends in `start`: it finds or compiles the plan for this call, gives it
a tag, and runs it.  The path of a call is

    collectives.py (what goes where)  ->  ProcessGroup.start  ->  plan.py  ->  run.py (Isend, Irecv)

or, for small calls, ends in persistent.py (Send_init, Recv_init, Start), to which small.py is the
short way.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from mpipar import schedule as schedules
from mpipar.arrays import Array, is_device
from mpipar.comm import abort, choice, clock, device, library, node, roster, waiting
from mpipar.comm.calls import Call, UserOp, algorithms, allowed, block_sizes, check_op, label_of
from mpipar.comm.device_run import DeviceExecution, device_fold
from mpipar.comm.flight import DESTROY, Flight, Record, describe_groups
from mpipar.comm.handle import Handle
from mpipar.comm.persistent import Persistent
from mpipar.comm.plan import compile_plan
from mpipar.comm.prepare import Prepared, dividing, fold_of, layout_of
from mpipar.comm.run import Execution, Requests, ScratchPool
from mpipar.comm.shared_memory import Windows
from mpipar.comm.small import Key, SmallReduce
from mpipar.comm.staging import Transfers
from mpipar.errors import (
    ConfigError,
    DestroyedError,
    MismatchError,
    MpiparError,
    StateError,
    explain,
)
from mpipar.trace import record as trace
from mpipar.trace.record import Label

PERSISTENT_BYTES = 1 << 18  # calls up to this size run on prepared requests
PERSISTENT_RANKS = 64
KEEP_PREPARED = 512  # calls whose plans are kept,
KEEP_BYTES = 1 << 26  # and the bytes of those on prepared requests, which have their own buffers
# Tags: 0 the watchdogs, 1 send and recv, then persistent plans by signature, then the sequence.
MESSAGE_TAG, PERSISTENT_TAG, SEQUENCE_TAG = 1, 16, 8192
LARGEST_TAG = SEQUENCE_TAG + (0x3FFF << 8) + 0xFF


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
        on: str = "cpu",
    ) -> None:
        abort.install()
        options = (algorithm, reproducible, check, timeout, segment_bytes, on)
        wrong = _wrong_option(algorithm, timeout, segment_bytes)
        self.raw = raw.Dup()
        self.raw.Set_errhandler(MPI.ERRORS_RETURN)
        note = zlib.crc32(repr((options, wrong)).encode())
        self.nodes, told, self._crowded = node.discover(self.raw, note)
        if wrong or len(set(told)) > 1:
            self._refuse(wrong or f"options {options}", wrong)
        roster.meet(self.raw)
        self.rank, self.size = self.raw.rank, self.raw.size
        self.name = name or f"{self.size} ranks"
        self.algorithm, self.reproducible, self.check = algorithm, reproducible, check
        self.timeout, self.segment_bytes = timeout, segment_bytes
        node.set_blas_threads(self.nodes)
        waiting.set_oversubscribed(node.local_ranks(self.nodes) > node.cores())
        self.lane: device.Lane | None = None
        if on == "cuda":
            self.lane = device.agree(self.raw, node.local_rank(self.nodes))
            self.between = Transfers(self.raw, MESSAGE_TAG, self.lane)
            self.messages = 0
        self.table = self._agree_table()
        self.flight = Flight(self.raw, self.name, timeout)
        self.calls: Counter[str] = Counter()
        self.seconds = 0.0
        self.sequence = 0
        self.about = ""  # what the latest call is of, in words, where arrays do not tell it
        self.destroyed = False
        self._parting: Requests | None = None  # a barrier, once `destroy` has begun
        self.broken: BaseException | None = None  # what went wrong in a call that had begun
        self.pool = ScratchPool()
        self._prepared: dict[Call, Prepared] = {}
        self._kept_bytes = 0
        self.small: dict[Key, SmallReduce] = {}
        self.windows = Windows(self)
        self.owned: dict[Any, Any] = {}  # communicators made of this one's ranks, by any key

    def _refuse(self, mine: str, wrong: str) -> NoReturn:
        """Raise on every rank: an option is wrong, or they differ."""
        texts = self.raw.allgather(mine)
        self.raw.Free()
        if len(set(texts)) == 1:
            raise ConfigError(wrong)
        raise MismatchError(
            "the ranks make a communicator with different options: "
            + describe_groups(dict(enumerate(texts)))
            + ". Pass the same ones on every rank"
        )

    def _agree_table(self) -> choice.Table:
        """Return the tuning table that rank 0 reads; raise ConfigError on every rank if it is none.

        With one rank nothing is chosen.
        """
        if self.size == 1:
            return choice.Table({})
        told: choice.Table | str = ""
        if self.rank == 0:
            try:
                told = choice.read_table(choice.table_path())
            except ConfigError as error:
                told = str(error)
        told = self.raw.bcast(told, root=0)
        if isinstance(told, str):
            self.raw.Free()
            raise ConfigError(told)
        return told

    def require_alive(self) -> None:
        """Raise DestroyedError after `destroy`, StateError after a call that went wrong."""
        if self.destroyed:
            raise DestroyedError(f"communicator {self.name!r} was destroyed; make a new one")
        if self.broken is not None:
            raise StateError(
                f"communicator {self.name!r} cannot go on after an error in an earlier call; make "
                f"a new one. The error was {type(self.broken).__name__}: {self.broken}"
            )

    def asked(self, algorithm: Any) -> str:
        """Return the algorithm that a call asks for: the group's if it is None."""
        if algorithm is None:
            return self.algorithm
        if not isinstance(algorithm, str) or not algorithm:
            raise ConfigError(explain("algorithm", algorithm, "it must be a name", 'Pass "auto"'))
        return algorithm

    @property
    def all_seconds(self) -> float:
        """Seconds inside collectives, those of the communicators that this one owns included."""
        return self.seconds + sum(part.seconds for part in self.owned.values())

    def destroy(self) -> None:
        """Wait for what is in flight, and free everything of MPI; a second call does nothing.

        Raises MismatchError if other ranks call something else, CollectiveTimeoutError if they do
        not come; nothing is freed then.
        """
        if self.destroyed:
            return
        if not self._parted():
            return
        for part in self.owned.values():
            part.destroy()
        self.windows.close()
        self.destroyed = True
        self.flight.close()
        self.small.clear()
        while self._prepared:
            self._forget()
        self.raw.Free()

    def _parted(self) -> bool:
        """Wait until every rank destroys the group; MPI's free itself may wait, and for ever.

        After an error the others may never come: then say whether they did, within a second.
        """
        if self.broken is not None:
            with contextlib.suppress(MPI.Exception, MpiparError):
                return waiting.wait_briefly(self._barrier().test)
            return False
        self._land()
        try:
            self._barrier().wait()
        except BaseException as error:
            self.fails(error)
            raise
        return True

    def _barrier(self) -> Requests:
        """Return the barrier of those that destroy the group, which has begun."""
        if self._parting is None:
            requests = [self.raw.Ibarrier()] if self.size > 1 else []
            place = "until all ranks destroy it"
            self._parting = Requests(requests, self.flight, lambda: None, place)
            self.flight.note(Record(self.sequence + 1, DESTROY, self._parting))
        return self._parting

    def _land(self) -> None:
        """Wait for what is in flight."""
        for test in waiting.in_flight():
            if getattr(test.__self__, "comm", None) is self.raw:  # type: ignore[attr-defined]
                waiting.wait(test, self.flight)

    def fails(self, error: BaseException) -> None:
        """Remember that a call went wrong after it had begun: its messages may still be about."""
        self.broken = self.broken or error
        self.small.clear()

    # -- running ---------------------------------------------------------------------------------

    def start(
        self,
        call: Call,
        source: Array,
        output: Array,
        finish: Callable[[], Any],
        async_op: bool = False,
    ) -> Any:
        """Run a call from the flat `source` to the flat `output`; return the result or a handle."""
        begun = clock.begin()
        prepared = self._prepared.get(call) if self.broken is None else None
        if prepared is None:
            prepared = self.prepare(call)
        self.sequence += 1
        self.calls[call.collective] += 1
        what = prepared.label.details + self.about
        record = self.flight.note(Record(self.sequence, what))
        try:
            persistent = prepared.persistent
            if persistent is not None and not async_op:
                persistent.input[:] = source if self.lane is None else device.read(source)
                persistent.run()
                if self.lane is None:
                    output[:] = persistent.output
                else:
                    device.write(output, persistent.output)
                result = finish()
            else:
                label = prepared.label
                if async_op and trace.to is not None:
                    finish = trace.to.flying(self.flight, label, self.sequence, finish)
                handle = record.handle = self._launch(call, prepared, source, output, finish)
                result = Handle(handle, self, label, record.sequence) if async_op else handle.wait()
        except BaseException as error:
            self.fails(error)
            raise
        self.spent(begun, prepared.label, record.sequence)
        return result

    def spent(self, begun: clock.Begun, label: Label, sequence: int) -> None:
        """End a call of the group: count its seconds, and tell a trace of it."""
        seconds = clock.end(begun)
        self.seconds += seconds
        if trace.to is not None:
            trace.to.call(self.flight, label, sequence, begun[0], seconds)

    def _launch(
        self,
        call: Call,
        prepared: Prepared,
        source: Array,
        output: Array,
        finish: Callable[[], Any],
    ) -> Execution | Requests:
        if prepared.plan is None:
            request = library.start(
                self.raw, call.collective, source, output, call.sizes, call.op, call.root
            )
            if prepared.divisor != 1:
                finish = dividing(output, prepared.divisor, finish)
            return Requests([request], self.flight, finish, "inside the MPI library")
        signature = zlib.crc32(self.about.encode(), prepared.signature)
        tag = SEQUENCE_TAG + ((self.sequence & 0x3FFF) << 8) + (signature & 0xFF)
        how = {"plan": prepared.plan, "source": source, "output": output, "tag": tag}
        how |= {"divisor": prepared.divisor, "pool": self.pool, "watchdog": self.flight}
        if self.lane is None:
            return Execution(self.raw, fold=prepared.fold, finish=finish, **how)
        if is_device(source) or is_device(output):
            fold = device_fold(call.op)
            return DeviceExecution(self.raw, self.lane, fold=fold, finish=finish, **how)
        pieces = self.lane.piece_bytes
        return Execution(self.raw, fold=prepared.fold, finish=finish, piece_bytes=pieces, **how)

    # -- preparing -------------------------------------------------------------------------------

    def prepare(self, call: Call) -> Prepared:
        """Choose the algorithm and compile the plan of a call, once."""
        self.require_alive()
        algorithm = self.validate(call)
        label = label_of(call, algorithm)
        prepared = Prepared(algorithm, label, zlib.crc32(label.details.encode()))
        prepared.divisor = self.size if call.op == "mean" else 1
        if algorithm != "mpi":
            self._compile(call, prepared, label.bytes)
        if call.once or isinstance(call.op, UserOp):
            return prepared
        prepared.nbytes = label.bytes if prepared.persistent is not None else 0
        self._kept_bytes += prepared.nbytes
        while len(self._prepared) >= KEEP_PREPARED or self._kept_bytes > KEEP_BYTES:
            self._forget()
        self._prepared[call] = prepared
        return prepared

    def _forget(self) -> None:
        """Drop the oldest prepared call: the same one on every rank."""
        call = next(iter(self._prepared))
        prepared = self._prepared.pop(call)
        self._kept_bytes -= prepared.nbytes
        if prepared.persistent is not None:
            prepared.persistent.free()
            for key in [k for k, small in self.small.items() if small.of(prepared.persistent)]:
                del self.small[key]

    def validate(self, call: Call) -> str:
        """Return the algorithm of a call.

        Raises ConfigError or DtypeMismatchError if the algorithm or operation does not fit.
        """
        check_op(call)
        wanted = allowed(call, self.algorithm, self.reproducible)
        if self.lane is not None and (wanted == "mpi" or isinstance(call.op, UserOp)):
            what = ("algorithm", "mpi") if wanted == "mpi" else ("op", "an MPI.Op")
            rule = "the arrays of this communicator may be the GPU's, which the library cannot add"
            raise ConfigError(explain(*what, rule, 'Use "auto" and a name'))
        if wanted != "auto":
            return wanted
        nbytes = sum(call.sizes) * call.dtype.itemsize
        chosen = choice.choose(call.collective, nbytes, self.size, self.nodes, self.table)
        if chosen == "mpi" and self.lane is not None:
            return choice.choose(call.collective, nbytes, self.size, self.nodes, choice.Table({}))
        return chosen

    def _compile(self, call: Call, prepared: Prepared, nbytes: int) -> None:
        made = schedules.make(
            call.collective,
            prepared.algorithm,
            self.size,
            root=call.root,
            offset=call.offset,
            nodes=self.nodes.sizes if prepared.algorithm == "hierarchical" else None,
        )
        made = self._cut(made, max(block_sizes(call, made.blocks), default=0) * call.dtype.itemsize)
        sizes = block_sizes(call, made.blocks)
        layout = layout_of(made, self.rank, sizes)
        plan = prepared.plan = compile_plan(made, self.rank, layout)
        prepared.fold = fold_of(call)
        small = nbytes <= PERSISTENT_BYTES and self.size <= PERSISTENT_RANKS
        if small and not call.once and not isinstance(call.op, UserOp):
            tag = PERSISTENT_TAG + prepared.signature % (SEQUENCE_TAG - PERSISTENT_TAG)
            prepared.persistent = Persistent(
                self.raw, plan, call.dtype, tag, prepared.fold, prepared.divisor, self.flight
            )
            if call.collective == "all_reduce" and not self.check and isinstance(call.op, str):
                self._shorten(call, prepared, prepared.persistent)

    def _cut(self, made: schedules.CommSchedule, chunk_bytes: int) -> schedules.CommSchedule:
        """Cut large chunks, so that one thing goes on beside another."""
        if not made.reduced:
            return made
        parts = choice.parts if made.algorithm == "hierarchical" else choice.segments
        return schedules.cut(made, parts(chunk_bytes, self.segment_bytes, self._crowded))

    def _shorten(self, call: Call, prepared: Prepared, persistent: Persistent) -> None:
        """Let the next call like this one take the short way, whether it names the algorithm."""
        small = SmallReduce(self, prepared, persistent)
        self.small[call.op, call.algorithm, call.dtype, call.sizes[0]] = small
        if call.algorithm == self.algorithm:
            self.small[call.op, None, call.dtype, call.sizes[0]] = small


def _wrong_option(algorithm: Any, timeout: Any, segment_bytes: Any) -> str:
    """Return what is wrong with the options of a group, or ""."""
    known = {name for collective in schedules.generators for name in algorithms(collective)}
    if algorithm != "auto" and algorithm not in known:
        choices = ", ".join(["auto", *sorted(known)])
        return explain("algorithm", algorithm, "not known", f"One of: {choices}")
    if not isinstance(timeout, int | float) or not timeout > 0:
        return explain("timeout", timeout, "it must be positive seconds", "Pass 600.0")
    whole = segment_bytes is None or isinstance(segment_bytes, int)
    if not whole or (segment_bytes is not None and segment_bytes < 1):
        return explain("segment_bytes", segment_bytes, "it must be at least 1", "Pass None")
    return ""
