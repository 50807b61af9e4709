"""DataParallel: a module whose gradients are averaged over ranks while backward runs.

    rank 0   batch 0 ─ forward ─ backward: w2 w1 │ w0 │ end         every rank has the same weights
    rank 1   batch 1 ─ forward ─ backward: w2 w1 │ w0 │ end         and, at the end of backward, the
                                   bucket 0 ─────┘    └─ bucket 1   same gradients

A hook on every parameter hands its gradient to a GradientSynchronizer as soon as it is complete.
The end of backward waits for the buckets.  Backward writes the gradients straight to the buckets
(`Parameter.home`), and the results are views of them: nothing is copied in or out.  Results that
are not cleared are set aside first, and the next ones added to them (set_aside.py).

A backward that raises ends the step on all ranks, with an error on the others (see `fail` of the
synchronizer): it leaves the gradients there were after the last step, and the next can begin.

`join` lets ranks have unequal numbers of batches.  Each step then begins with a count; a rank that
has no more batches counts as 0 and takes part with zeros until the count of all is 0:

    rank 0   1 ── reduce   1 ── reduce   1 ── reduce          0 ── all done
    rank 1   1 ── reduce   1 ── reduce   0 ── reduce zeros    0 ── all done
             sum / 2       sum / 2       sum / 1

Li et al., PyTorch Distributed (VLDB 2020), whose habits these are.  Cost of a step: an all_reduce
of the gradients, most of it beside backward, and one of a byte a parameter.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import numpy as np

from mpipar.autograd import after_backward, around_backward, is_grad_enabled
from mpipar.errors import ConfigError, MpiparError, StateError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.data_parallel.accumulation import Accumulation
from mpipar.parallel.data_parallel.set_aside import SetAside
from mpipar.parallel.data_parallel.synchronizer import GradientSynchronizer
from mpipar.parallel.wrapped import Wrapper, require_communicator, require_unwrapped


class _Replicas(threading.local):
    """The wrappers of this thread that are in use."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[DataParallel] = weakref.WeakSet()


_replicas = _Replicas()


class DataParallel(Accumulation, Wrapper):
    """A module that every rank of `comm` holds, fed with another part of the batch on each.

        model = mp.DataParallel(model, mesh.dp)
        for x, y in batches:
            loss = loss_of(model(x), y)           # the mean over this rank's part
            model.zero_grad()
            loss.backward()                       # leaves the mean over the ranks in .grad
            optimizer.step()

    A loss of `token_mean` is the mean over all ranks already; op="sum" adds their gradients:

        model = mp.DataParallel(model, mesh.dp, op="sum")
        loss = mp.token_mean(*model.loss(tokens, targets), mesh.dp)

    Accumulation, of the mean over 4 batches:

        model = mp.DataParallel(model, mesh.dp, accumulation_steps=4)
        for number, (x, y) in enumerate(batches):
            loss_of(model(x), y).backward()       # every fourth reduces, and divides by 4
            if number % 4 == 3:
                optimizer.step()
                model.zero_grad()

    With accumulation_steps=1, backwards in `no_sync()` and the one after it are added, not divided:
    for losses that `token_mean(..., total=)` has divided by the number of the whole batch.

    Clear the gradients between steps, or else each adds its own to what was reduced before (and,
    clipped or not, is not reduced again).  Between no_sync() and the next step, `.grad` of what got
    more is this rank's part of the step alone.  A rank without a loss calls `mp.backward()`; with
    several wrappers it runs a forward of the one that the others train.
    Parameters that become trainable, or are replaced, need a new wrapper.
    After a step gradients are views of buckets, which the next backward writes again: copy what
    you keep.  On one node they lie there once for all ranks and are READ-ONLY: clip with
    `clip_grad_norm`, which makes copies, or pass `clip_factor(norm, max_norm)` to
    `optimizer.step(grad_scale=)`, which needs none; shared=False makes gradients that can be
    written.
    Attributes are those of the module, and so are the names in `state_dict`.
    Experts that are spread over a group (see `MoE`) are left alone: each rank has others.
    """

    reduces_gradients = True

    def __init__(
        self,
        module: Any,
        comm: Communicator,
        accumulation_steps: int = 1,
        bucket_mb: float = 25,
        op: str = "mean",
        *,
        wire_dtype: Any = None,
        shared: bool | None = None,
    ) -> None:
        """Collective over `comm`: every rank gets the parameters of rank 0.

        accumulation_steps: backward communicates every so many times, and the gradient is the mean
        over them, whatever `op` is over the ranks.
        bucket_mb, wire_dtype, shared: those of GradientSynchronizer.
        op: "mean" over the ranks, or "sum", for losses that are terms of one mean (`token_mean`).

        Raises ConfigError for settings that cannot work, and MismatchError on every rank if the
        parameters have other shapes or dtypes on some.
        """
        require_unwrapped(module, "DataParallel")
        require_communicator(comm)
        if accumulation_steps < 1:
            rule = "backward runs at least once a step"
            raise ConfigError(explain("accumulation_steps", accumulation_steps, rule, "Pass 1"))
        self.module, self.comm, self.accumulation_steps = module, comm, accumulation_steps
        self._all = [param for param in module.parameters() if not _is_spread_expert(param)]
        self._params = [param for param in self._all if param.requires_grad]
        how = {"wire_dtype": wire_dtype, "steps": accumulation_steps, "shared": shared}
        self._synchronizer = GradientSynchronizer(comm, bucket_mb, op, into_buckets=True, **how)
        self._synchronizer.register(self._params[::-1])  # backward meets the last one first
        self._synchronizer.start()
        self._copy_state(src=0)
        self._expected = False  # whether the next backward is one of this module
        self._quiet = 0  # how many `no_sync` blocks this is in
        self._by_hand = False  # between start_accumulation and the sync
        self._idle = False  # expected because it has no loss: others may have one
        self._done = 0  # backwards since the last sync
        self._aside = SetAside()
        self._known = {id(param) for param in self._params}
        self._handles = [param.register_hook(self._complete) for param in self._params]
        self._handles += _around_backward(self)
        _replicas.alive.add(self)

    def destroy(self) -> None:
        """Collective: free the communicator and leave the module alone; twice is harmless.

        The parameters keep their gradients; other views of shared buckets must not be used any
        more.
        """
        while self._handles:
            self._handles.pop().remove()
        _replicas.alive.discard(self)
        self._synchronizer.close()

    def __enter__(self) -> "DataParallel":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error the other ranks may never come to free it
            self.destroy()

    # -- the module ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises StateError if parameters have become trainable, or were replaced, since it was
        wrapped.
        """
        if is_grad_enabled() and getattr(self.module, "training", True):
            self._check_parameters()
            self._expected = True  # also where this rank will turn out to use no parameter
        return self.module(*args, **kwargs)

    def _check_parameters(self) -> None:
        """Raise StateError if there is a trainable parameter that would not be reduced."""
        if self._handles and any(
            param.requires_grad and id(param) not in self._known and not _is_spread_expert(param)
            for param in self.module.parameters()
        ):
            names = [
                name
                for name, param in self.module.named_parameters()
                if param.requires_grad and id(param) not in self._known
            ]
            rule = "they became trainable, or are new, since the module was wrapped"
            fix = "On every rank, destroy() the wrapper and wrap the module again"
            raise StateError(explain("parameters", names, rule, fix))

    def __repr__(self) -> str:
        """Return the settings and the module."""
        how = f"{self.comm!r}, op={self._synchronizer.op!r}"
        if self.accumulation_steps > 1:
            how += f", accumulation_steps={self.accumulation_steps}"
        return f"{type(self).__name__}({how},\n{indent(repr(self.module), '  ')}\n)"

    # -- a step ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward inside the block add to this rank's gradients without communication.

        The next backward outside reduces the sum.
        """
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _complete(self, param: Any) -> None:
        """The hook of a parameter: its gradient in this backward is complete."""
        self._expected = True
        if self._is_last:
            self._synchronizer.submit(param, param.grad)

    @property
    def _is_last(self) -> bool:
        """Whether the backward that runs is followed by a sync."""
        alone = self._quiet or self._by_hand
        return not alone and self._done + 1 == self.accumulation_steps

    def _begin_backward(self, idle: bool) -> None:
        if idle and self.comm.size > 1:
            self._take_part()
        self._aside.take()

    def _take_part(self) -> None:
        """Expect the step of this module, if it is the only one, in a backward without a loss."""
        if any(replica._expected for replica in _replicas.alive):
            return
        trained = [r for r in _replicas.alive if getattr(r.module, "training", True) and r._params]
        if len(trained) > 1:
            rule = f"a backward without a loss takes part in a step of one of {len(trained)}"
            fix = "Run a forward of the one that the other ranks train, or destroy() the others"
            raise StateError(explain("DataParallel", "no forward", rule, fix))
        if self in trained:
            self._expected = self._idle = True

    def _end_backward(self) -> None:
        if not self._expected:
            self._aside.keep()  # it was one of something else
            return
        if self._is_last:
            if not self._reduce() and not self._idle:
                return  # no rank used this module: the backward of its forward is still to come
            self._done = 0
        else:
            self._aside.keep()
            if not (self._quiet or self._by_hand):
                self._done += 1
        self._expected = self._idle = False

    def _fail(self, error: Exception) -> None:
        """A backward raised: end the step on all ranks."""
        if self._expected and self._is_last:
            self._synchronizer.fail(error)
            self._drop()
        else:
            self._aside.keep()

    def _reduce(self) -> bool:
        """Reduce all that is in the gradients; say whether there was anything on any rank."""
        try:
            for param in self._params:
                if param.grad is not None and not self._synchronizer.submitted(param):
                    self._synchronizer.submit(param, param.grad)
            used = self._synchronizer.sync()
        except MpiparError:
            self._drop()
            raise
        self._aside.add(self._params)
        return used

    def _drop(self) -> None:
        """Forget the step that runs: the gradients are those before it."""
        for param in self._params:
            param.grad = None
        self._aside.add(self._params)
        self._done, self._expected, self._idle = 0, False, False

    # -- unequal numbers of batches ----------------------------------------------------------------

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Collective: ranks may run unequal numbers of backwards in the block.

        The mean of each step is over the batches there were.  A rank that leaves the block early
        takes part in the others' steps until all have left.  If some had more steps, all end with
        the parameters and gradients of those (not with their optimiser's state).
        Gradients are cleared between steps; of collectives, the block has only this module's.
        An error that leaves the block on one rank is a StateError in the next step of the others;
        it goes on once they have been told.
        """
        if self.comm.size == 1:
            yield
            return
        self._synchronizer.begin_counting()
        try:
            yield
            self._follow()
        except Exception as error:
            self._synchronizer.leave(error)
            self._drop()
            raise
        finally:
            self._synchronizer.counted = False

    def _follow(self) -> None:
        """Take part in the steps of the ranks that are still in the block."""
        mine, self._done, self._expected = self._done, 0, False
        stepped = self._synchronizer.counts == self.accumulation_steps
        while (counts := self._synchronizer.count(mine)).any():
            if mine:  # of an accumulation that this rank left unfinished
                self._reduce()
            else:
                self._synchronizer.sync()
                self._aside.add(self._params)
            mine = 0
            if self.accumulation_steps in counts:
                stepped = counts == self.accumulation_steps
        if not stepped.all():
            self._copy_state(src=int(np.flatnonzero(stepped)[-1]))

    def _copy_state(self, src: int) -> None:
        """Give every rank the parameters of rank `src`."""
        if self.comm.size == 1:
            return
        for param in self._all:
            param.data[...] = self.comm.broadcast(param.data, src=src)


def _is_spread_expert(param: Any) -> bool:
    """Say whether the ranks hold different experts in it, so that theirs is another sum."""
    return "ep" in getattr(getattr(param, "spec", None), "placements", ())


def _around_backward(replica: DataParallel) -> list[Any]:
    """Tell the replica of every backward, as long as somebody holds it."""
    held = weakref.WeakMethod

    def call(method: weakref.WeakMethod[Any]) -> Any:
        def forward(*args: Any) -> None:
            alive = method()
            if alive is not None:
                alive(*args)

        return forward

    begin, end = call(held(replica._begin_backward)), call(held(replica._end_backward))
    handles = [after_backward(end), around_backward(begin, call(held(replica._fail)))]
    for handle in handles:
        weakref.finalize(replica, handle.remove)
    return handles
