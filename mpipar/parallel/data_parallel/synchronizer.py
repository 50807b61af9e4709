"""GradientSynchronizer: gradients are reduced in buckets while backward still computes others.

    rank 0   submit w2, w1 | w0  ...            buckets   0: w2 w1     1: w0
    rank 1   submit w1 | w0, w2  ...

    rank 0   w2 w1 -> start 0      w0 -> start 1     sync: wait for 0, 1
    rank 1   w1    w0   w2 -> start 0, start 1       sync: wait for 0, 1

There is no thread and nobody is asked whether a bucket may start. All ranks start the buckets in
ONE order: a rank starts bucket k, by posting its messages, once it has all of k and has started
those before it. No message of an all-reduce completes the sum before every rank has started it, so
that a bucket is reduced once every rank has submitted all of it. `sync` starts the rest in that
order, with zeros for what this rank did not use; one more small all-reduce (a byte a parameter)
finds out what nobody used, and whether a rank could not end its step: then all raise. The messages
have a communicator of their own, because ranks start buckets at different places among their other
collectives.

What is in flight is advanced by the pump of the autograd tape, between the nodes of backward, and
by every `submit`.  On one node no message travels: buckets lie in memory that the ranks share, each
rank adds its block of all ranks' gradients, and the sum lies there once (comm/shared_buckets.py).
Else, as a pump advances few rounds far better than many, the all-reduce inside a node is the direct
one, 2 rounds.  Cost for n bytes: p n bytes read and n written by all ranks together, on shared
memory; 2 (p-1)/p n bytes sent by each, as for a ring, by messages.

The first step's buckets follow the order of registration, later ones the order in which rank 0 saw
gradients arrive.  Li et al., PyTorch Distributed (VLDB 2020), section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.arrays import dtype as dtype_of
from mpipar.autograd import Tensor, add_pump
from mpipar.comm import buckets, waiting
from mpipar.comm.slots import Slots, name_of
from mpipar.errors import (
    ConfigError,
    MismatchError,
    StateError,
    explain,
)
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.data_parallel.failed_steps import LOST, FailedSteps
from mpipar.parallel.wrapped import require_communicator

NAMED = 254  # ranks up to this one are named when they fail
DIRECT_RANKS = 32  # groups up to this size, inside a node, use the direct all-reduce


class GradientSynchronizer(FailedSteps):
    """Reduces the gradients of parameters over the ranks of `comm`; see the module.

        with mp.GradientSynchronizer(comm) as synchronizer:
            synchronizer.register(params)
            for batch in batches:
                ...                                  # for each gradient, as soon as it is there:
                synchronizer.submit(param, grad)
                synchronizer.sync()                  # param.grad is the mean over the ranks

    Gradients in `param.grad` are views of the buckets, which the next step writes again.  Where all
    ranks of a node read the same one, they cannot be written: see `shared`.
    """

    def __init__(
        self,
        comm: Communicator,
        bucket_mb: float = 25,
        op: str = "mean",
        *,
        wire_dtype: Any = None,
        steps: int = 1,
        into_buckets: bool = False,
        shared: bool | None = None,
    ) -> None:
        """Settings, the same on every rank; `start` is collective.

        bucket_mb: size of a bucket in 2^20 bytes; a fraction is fine.
        op: "mean" or "sum" over the ranks.
        wire_dtype: None, or "float16" or "bfloat16": what wider gradients travel as.  Sums are
        taken in float32 and rounded once.
        steps: how many gradients were added up in each one that is submitted; the result is divided
        by it.
        into_buckets: let backward write the gradients of Parameters straight to the buckets.
        shared: whether buckets lie in memory that the ranks of a node share.  The results then lie
        there once for all ranks, and cannot be written.  None: yes, where all ranks are on one
        node, nothing asks for messages (an algorithm, a wire_dtype, MPIPAR_WINDOWS=0) and there is
        room in /dev/shm: p + 1 times the bytes of the gradients.

        Raises ConfigError for settings that cannot work.
        """
        require_communicator(comm)
        buckets.check_settings(bucket_mb, op, steps, wire_dtype, shared)
        self.comm, self.op, self.steps = comm, op, steps
        self.bucket_mb = bucket_mb
        self.counted = False  # whether each step begins by counting who takes part
        self.counts = np.full(comm.size, steps)  # the steps of each rank in the latest result
        group = comm.process_group
        few = comm.size <= DIRECT_RANKS and group.nodes.count == 1 and group.algorithm == "auto"
        self._algorithm = "direct" if few else None  # the fewest rounds, where that is no waste
        self._wire = None if wire_dtype is None or comm.size == 1 else dtype_of(wire_dtype)
        self._shared = shared
        self._slots = Slots(into_buckets)
        self._link: Communicator | None = None
        self._started = self._running = False
        self._buckets: Any = None
        self._agreement: Any = None  # the question in flight whether all registered the same
        self._stale = True  # parameters were registered after the buckets were made
        self._arrivals: list[int] | None = []  # None once the order is settled
        self._counting: Any = None
        self._broken = ""  # why no step can follow
        self._left = False  # a rank has left the counted block by an error
        self._pump: Any = None

    def start(self) -> "GradientSynchronizer":
        """Collective: make the communicator of the buckets; a second call does nothing.

        Raises MismatchError on every rank if different parameters were registered before.
        """
        if self._started:
            return self
        self._started = True
        group = self.comm.process_group
        if self.comm.size > 1:
            how: dict[str, Any] = {"algorithm": group.algorithm, "timeout": group.timeout}
            how |= {"reproducible": group.reproducible, "segment_bytes": group.segment_bytes}
            name = f"gradients of {self.comm.name}"
            self._link = Communicator(group.raw, self.comm.device, name, **how)
            self._link.process_group.calls = group.calls  # they count as the group's
        if self._slots.all:
            self._ask()
            self._agreed(wait=True)
            self._share()
            self._fill(range(len(self._slots.all)))
        return self

    def close(self) -> None:
        """Collective: free the communicator; a second call does nothing.

        The parameters keep their gradients; other views of shared buckets must not be used any
        more.
        """
        if not self._started:
            return
        self._started = False
        self._reset()
        self._slots.give_back()
        if self._link is not None:
            self._link.destroy()
            self._link = None

    def __enter__(self) -> "GradientSynchronizer":
        return self.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never come to free it
            self._reset()

    def register(self, params: Any, uses: int = 1) -> None:
        """Say which parameters will be submitted, on every rank the same in the same order.

        params: a Tensor or several; one that is registered already keeps its place.
        uses: how often each is submitted in a step; its gradient is the sum.

        Raises ConfigError if uses is not positive, StateError within a step.
        """
        if uses < 1:
            raise ConfigError(explain("uses", uses, "it is at least 1", "Pass 1"))
        if self._running:
            rule = "parameters are registered between steps, not within one"
            raise StateError(explain("register", "a step that began", rule, "Call sync() first"))
        for param in [params] if isinstance(params, Tensor) else params:
            if self._slots.add(param, uses):
                self._stale, self._arrivals = True, []

    def submit(self, param: Any, grad: Any) -> None:
        """Hand in a gradient of `param`, an array of its shape and dtype; it is copied.

        Any order will do, a different one on each rank too.  Nothing is copied if `grad` is the
        parameter's view of its bucket.

        Raises ConfigError if the parameter is not registered, StateError if it was submitted
        `uses` times in this step, BufferMismatchError or DtypeMismatchError if `grad` does not fit.
        """
        slot = self._slots.find(param)
        grad = grad.data if isinstance(grad, Tensor) else grad
        slot.check(grad)
        if not self._running:
            self._begin()
        if grad is not slot.view:
            if slot.left == slot.uses:
                slot.view[...] = grad
            else:
                slot.view += grad
        slot.left -= 1
        if slot.left == 0:
            if self._arrivals is not None:
                self._arrivals.append(slot.number)
            slot.bucket.missing -= 1
        self._advance()

    def submitted(self, param: Any) -> bool:
        """Say whether this step has all of the parameter's gradient from this rank."""
        return self._slots.find(param).left == 0

    def sync(self) -> bool:
        """Collective: say that this rank has submitted all, and wait for the results.

        They are in `param.grad` then: zeros were taken for what only other ranks used, and None is
        there for what no rank used.  Returns whether any rank used anything.

        Raises MismatchError on every rank if they registered different parameters, StateError on
        every rank if one could not end its step.
        """
        return self._end_step(failed=False)

    def device_of(self, param: Any) -> str:
        """Return where the gradient of `param` is reduced: "cpu" or "cuda"."""
        return buckets.Item.like(self._slots.find(param).param.data).device

    def snapshot(self, param: Any) -> Array | None:
        """Return a copy of the gradient of `param`: what this rank has submitted in this step so
        far, or else `param.grad`; None if there is nothing.

        Raises StateError while its bucket is on its way.
        """
        slot = self._slots.find(param)
        if self._running and slot.left < slot.uses:
            if slot.bucket.handle is not None:
                rule = "its gradient is being reduced"
                raise StateError(explain("param", name_of(param), rule, "Call sync() first"))
            return slot.view.copy()
        return None if param.grad is None else param.grad.copy()

    def _begin(self, steps: int | None = None) -> None:
        if not self._started:
            rule, fix = "it works between start() and close()", "Use it in a with block"
            raise StateError(explain("synchronizer", "not started", rule, fix))
        if self._broken:
            rule = f"no step can follow one that ended in {self._broken}"
            fix = "On every rank, destroy() what reduces the gradients, and make it again"
            raise StateError(explain("synchronizer", "a failed step", rule, fix))
        if self.counted and self._left:
            self._check_who_left()
        if self._stale:
            self._ask()
            self._slots.memory = None  # to share some is collective: the end of the step does so
            self._fill(range(len(self._slots.all)))
        self._running = True
        if not self.counted or self._link is None:
            self.counts = np.full(self.comm.size, self.steps)
        if self._link is None:
            return
        if self.counted:
            mine = np.zeros(self.comm.size, np.int64)
            mine[self.comm.rank] = self.steps if steps is None else steps
            self._counting = self._link.all_reduce(mine, out=mine, async_op=True)
        if self._pump is None:
            self._pump = add_pump(self._advance)

    def _end_step(self, failed: bool) -> bool:
        """End a step on all ranks; `failed` says that this one has not all it should have."""
        try:
            if not self._running:
                self._begin()
            used = np.array([slot.left < slot.uses for slot in self._slots.all] + [0], np.uint8)
            if failed:
                used[-1] = min(self.comm.rank, NAMED) + 1
            self._agreed(wait=True)
            for slot in self._slots.all:
                if slot.left == slot.uses:
                    slot.view.fill(0)
            self._buckets.finish(self._divisor)
            self._hand_out(used)
        except LOST as error:
            self._give_up(error)
            raise
        finally:
            self._reset()
        return bool(used[:-1].any())

    def _advance(self) -> None:
        """Advance what is in flight, and start what may start."""
        waiting.progress()
        if not self._buckets.all_started and self._agreed(wait=False) and self._divides():
            self._buckets.start_complete()

    def _divides(self) -> bool:
        """Whether it is known what sums are divided by, if they are divided as they are added."""
        return self._slots.memory is None or self._counting is None or self._counting.test()

    def _reduce(self, bucket: buckets.Bucket) -> Any:
        """Post the all-reduce of a bucket; return its handle."""
        if self._link is None:
            return None
        if self._slots.memory is not None and bucket.place is not None:
            return self._slots.memory.reduce(bucket.place, self._divisor(bucket))
        flat = bucket.outgoing()
        op = "mean" if self._divides_inside(bucket) else "sum"
        return self._link.all_reduce(flat, op, out=flat, algorithm=self._algorithm, async_op=True)

    def _divides_inside(self, bucket: buckets.Bucket) -> bool:
        """Whether the sum is divided by the number of ranks where it is added up.

        That spares a pass over memory, and 16-bit sums an overflow.  Else it is divided once, after
        the sum, by ranks times steps.
        """
        plain = self.steps == 1 and not self.counted
        return self.op == "mean" and bucket.place is None and (plain or bucket.sixteen_bit)

    def _divisor(self, bucket: buckets.Bucket) -> float:
        """Return what a sum that came back is still to be divided by."""
        counts = self._wait_for_counts()
        if self.op == "sum":
            return self.steps
        return float(counts.clip(0).sum()) / (self.comm.size if self._divides_inside(bucket) else 1)

    def _hand_out(self, used: np.ndarray) -> None:
        """Find out what was used anywhere; leave the results in the parameters."""
        if self._link is not None and used.size > 1:
            self._wait_for_counts()
            self._link.all_reduce(used, "max", out=used)
        if used[-1]:
            self._check_who_left()
            who = f"rank {used[-1] - 1}" if used[-1] <= NAMED else "a rank"
            rule = f"{who} of communicator {self.comm.name!r} could not end its backward"
            fix = "See the error there; this step left no gradients, and another may begin"
            raise StateError(explain("sync", "a failed step", rule, fix))
        self._slots.hand_out(used[:-1])
        if self._link is not None and self._arrivals is not None and used[:-1].any():
            self._settle(self._link)

    def _wait_for_counts(self) -> np.ndarray:
        if self._counting is not None:
            self.counts = self._counting.wait()
            self._counting = None
        return self.counts

    def _reset(self) -> None:
        self._running, self._counting = False, None
        if self._pump is not None:
            self._pump.remove()
            self._pump = None
        for slot in self._slots.all:
            slot.left = slot.uses
        if self._buckets is not None:
            self._buckets.reset()
        if self._link is not None:
            group = self._link.process_group
            self.comm.process_group.seconds += group.seconds
            group.seconds = 0.0

    def _ask(self) -> None:
        """Ask whether all ranks have registered the same."""
        self._stale = False
        if self._link is not None:
            settings = (self.bucket_mb, self.op, self.steps, str(self._wire), self._shared)
            self._agreement = buckets.Agreement(self._link, f"{settings}{self._slots.described()}")

    def _share(self) -> None:
        """Collective: put the buckets into shared memory, if that is wanted and there is some."""
        if self._link is not None and self._wire is None:
            self._slots.share(self._link.process_group, self._shared)

    def _fill(self, order: Sequence[int]) -> None:
        capacity = self.bucket_mb * buckets.MEGABYTE
        self._buckets = self._slots.fill(order, capacity, self._wire, self._reduce)

    def _settle(self, link: Communicator) -> None:
        """Take the order in which rank 0 saw gradients arrive, for all steps from now on."""
        seen = dict.fromkeys([*(self._arrivals or ()), *range(len(self._slots.all))])
        order = np.array(list(seen), np.int64)
        order = link.broadcast(order, src=0, out=order)
        self._arrivals = None
        before = self._slots.memory
        if before is None:
            self._share()
        if self._slots.memory is not before or self._buckets.order != order.tolist():
            self._fill(order.tolist())

    def _agreed(self, wait: bool) -> bool:
        """Say whether all ranks are known to have registered the same parameters."""
        if self._agreement is None:
            return True
        others = self._agreement.others(wait)
        if others is None:
            return False
        self._agreement = None
        if others:
            self._stale = True
            raise MismatchError(
                f"ranks {others} of communicator {self.comm.name!r} registered other parameters "
                "(shapes, dtypes, order), or have other settings, than rank 0. Register the same "
                "on every rank"
            )
        return True
