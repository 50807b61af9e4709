"""FSDP: a module of which every rank holds a part, whole only where it is computed.

    rank 0   w[0:6]  ─ gather ─ forward w ─ free ─ gather ─ backward w ─ reduce_scatter ─ dw[0:6]
    rank 1   w[6:12] ─          forward w ─               ─ backward w ─                ─ dw[6:12]

    optimiser: on 1/p of the parameters, gradients and moments, no message

The module is cut in units, by default its blocks and the rest of it.  A hook before a unit's
forward gathers it, and the next one meanwhile (`prefetch`); a node in the graph, behind its
forward, does the same before its backward; the hooks of its parameters start the reduction of its
gradients.

Rajbhandari et al., ZeRO (SC 2020); Zhao et al., PyTorch FSDP (VLDB 2023), whose habits these are.
Cost of a step: reduce_scatter and all_gather of n parameters, as much as one all_reduce; one more
all_gather where parameters are freed between forward and backward.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any

from mpipar.arrays import Array
from mpipar.arrays import dtype as dtype_of
from mpipar.autograd import after_backward
from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Module, Parameter
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.fsdp import boundary, state
from mpipar.parallel.fsdp.backward import Backward
from mpipar.parallel.fsdp.build import modules_of, plan
from mpipar.parallel.fsdp.config import FsdpConfig, check_offload
from mpipar.parallel.fsdp.flags import Flags
from mpipar.parallel.fsdp.gather import Gatherer
from mpipar.parallel.fsdp.links import Links
from mpipar.parallel.fsdp.memory import Memory, give_back_freed, measure
from mpipar.parallel.fsdp.reducer import Reducer
from mpipar.parallel.fsdp.unit import Cut, Named, Unit, costs_little
from mpipar.parallel.fsdp.watch import Watch
from mpipar.parallel.wrapped import Wrapper, require_communicator, require_unwrapped


class FSDP(Wrapper):
    """A module that the ranks of `comm` share out, fed with another part of the batch on each.

        model = mp.FSDP(model, mesh.dp, mp.FsdpConfig("FULL_SHARD"))
        optimizer = mp.optim.AdamW(model.parameters())       # of the shards, so after FSDP
        for x, y in batches:
            model.zero_grad()
            loss_of(model(x), y).backward()                  # leaves this rank's part of the mean
            mp.clip_grad_norm(model.parameters(), 1.0, mesh)  # with the mesh: shards are parts
            optimizer.step()

    What each strategy cuts over the ranks:

        SHARD_OPTIMIZER   ZeRO-1   the optimiser's state
        SHARD_GRAD_OP     ZeRO-2   and gradients
        FULL_SHARD        ZeRO-3   and parameters, gathered while a unit is computed
        HYBRID_SHARD      ZeRO-3 within groups of shard_size ranks, data parallel between them
        NO_SHARD          nothing, data parallel

    A loss of `token_mean` is the mean over all ranks already: pass op="sum".
    Accumulation: gradients of backwards without `zero_grad` between them are ADDED, reduced by each
    (or by the last alone, see `no_sync`), and never divided by their number, as
    DataParallel(accumulation_steps=) does: divide the loss.

    Every rank runs every forward and backward, and the same units in each (MismatchError).  An
    exception that is caught must be caught on every rank: others wait for one that leaves alone,
    until a time limit.  The module's own parameters
    are there while it runs, and empty otherwise; what there is of them is in `parameters()`.
    Attributes are those of the module, and so are the names in `state_dict`.
    """

    reduces_gradients = True

    def __init__(
        self,
        module: Module,
        comm: Communicator,
        config: FsdpConfig | None = None,
        units: Sequence[Module] | None = None,
        *,
        op: str = "mean",
    ) -> None:
        """Collective over `comm`: cut the parameters of rank 0.

        units: modules below `module` that are gathered one at a time, in the order in which they
        are used; None: `module.blocks`.  What is in none of them is gathered for a whole step.  The
        parameters of a unit are used within its forward only.
        op: "mean" over the ranks, or "sum", for losses that are terms of one mean (`token_mean`).

        Raises ConfigError for settings that cannot work, and MismatchError on every rank if the
        ranks have other parameters or settings.
        """
        require_unwrapped(module, "FSDP")
        require_communicator(comm)
        self.module, self.comm, self.op = module, comm, op
        self.config = config = FsdpConfig() if config is None else config
        if op not in ("mean", "sum"):
            raise ConfigError(explain("op", op, "gradients are added", 'Pass "mean" or "sum"'))
        self._modules = modules_of(module, units)
        for one in (module, *self._modules):
            boundary.check_free(one)
        made = plan(module, self._modules, config)
        shards = config.shard_ranks(comm.size)
        check_offload(config, comm.device, comm.rank)
        self._links = links = Links(comm, shards)
        links.agree(
            repr((config, op, [_described(m) for m in (*made.units, made.rest, made.whole)]))
        )
        self._names = [name for name, _ in module.named_parameters()]
        self._copy_state()
        flatten = config.flatten_parameters or shards == 1
        cut = Cut(links.axis, shards, links.shard_rank, links.copies, flatten, config.bucket_mb)
        uncut = cut._replace(ranks=1, rank=0, flatten=True)
        base = [self._unit("whole", made.whole, uncut), self._unit("rest", made.rest, cut)]
        own = [self._unit(f"unit {n}", members, cut) for n, members in enumerate(made.units)]
        self._base = [unit for unit in base if unit is not None]
        self._own = [unit for unit in own if unit is not None]
        self._units = [*self._base, *self._own]
        ahead = costs_little(self._own, 1) if config.prefetch is None else config.prefetch
        whole = (links.gather, config.frees_parameters, ahead)
        self._gatherer = Gatherer(self._base, self._own, *whole)
        wire: Any = None if config.reduce_dtype is None or comm.size == 1 else config.reduce_dtype
        wire = None if wire is None else dtype_of(wire)
        how = (links, op, config.keeps_gradients, wire, config.bucket_mb)
        self._reducer = Reducer(self._base, self._own, *how)
        self._shards = self._by_name()
        self._watch = Watch(self._units)
        self._flags = Flags(self._units, self._reducer.listen)
        self._backward = Backward(self._gatherer, self._reducer)
        self._quiet = 0  # how many `no_sync` blocks this is in
        self._wrapped: list[Module] = []
        self._wrap(own)
        self._at_the_end = _at_the_end(self)
        give_back_freed()

    def _unit(self, label: str, members: Sequence[Named], cut: Cut) -> Unit | None:
        """Return the unit of these parameters; None without any."""
        narrow = self.config.mixed_precision
        stays = not self.config.frees_parameters or cut.ranks == 1
        how = None if narrow is None else dtype_of(narrow)
        return Unit(label, members, cut, how, stays) if members else None

    def _by_name(self) -> dict[str, Parameter]:
        """Return {path in the module: shard} in the module's order."""
        found = {n: s for unit in self._units for n, s in zip(unit.names, unit.shards, strict=True)}
        return {name: found[name] for name in self._names}

    def _copy_state(self) -> None:
        """Give every rank the parameters of rank 0."""
        if self._links.all is not None:
            for param in self.module.parameters():
                param.data[...] = self._links.all.comm.broadcast(param.data, src=0)

    # -- the module ------------------------------------------------------------------------------

    def _wrap(self, own: Sequence[Unit | None]) -> None:
        """Put the hooks into the modules."""
        narrow = self.config.mixed_precision
        cast = None if narrow is None else boundary.cast_to(dtype_of(narrow))
        boundary.wrap(self.module, self._enter, self._leave, self._enter_backward, cast)
        self._wrapped.append(self.module)
        for module, unit in zip(self._modules, own, strict=True):
            if unit is not None:
                enter, back = self._hooks_of(unit)
                boundary.wrap(module, enter, lambda recorded: None, back)
                self._wrapped.append(module)

    def _hooks_of(self, unit: Unit) -> tuple[Any, Any]:
        def enter() -> None:
            self._gatherer.use(unit)

        def back(entered: None) -> None:
            self._gatherer.backward = True
            self._gatherer.use(unit)
            self._reducer.expect(unit)

        return enter, back

    def _enter(self) -> tuple[int, int]:
        if self._gatherer.held:
            self._gatherer.begin(changed=False)
        else:
            self._backward.recover()
            self._flags.follow()
            self._watch.check_module()
            self._gatherer.begin(self._watch.changed(self._reducer.is_pending))
        return self._flags.epoch, self._watch.updates

    def _leave(self, recorded: bool) -> None:
        if not recorded:
            self._gatherer.rest()

    def _enter_backward(self, entered: tuple[int, int]) -> None:
        epoch, updates = entered
        self._flags.check(epoch)
        self._watch.check_updates(updates)
        self._backward.begin(quiet=self._quiet > 0)
        self._gatherer.use_base()
        for unit in self._base:
            self._reducer.expect(unit)

    def _end_backward(self) -> None:
        if not self._backward.expected:
            return  # it was one of something else
        self._backward.expected = False
        self._gatherer.rest()
        self._reducer.end()
        if not self._reducer.quiet:
            self.sync_gradients()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the settings and the module."""
        how = f"{self.comm!r}, {self.config.sharding_strategy}, op={self.op!r}"
        return f"{type(self).__name__}({how},\n{indent(repr(self.module), '  ')}\n)"

    # -- parameters and gradients ----------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (path in the module, this rank's shard); a shard may have no elements."""
        yield from self._shards.items()

    def parameters(self) -> list[Parameter]:
        """Return this rank's shards, for the optimiser."""
        return list(self._shards.values())

    def shard_parameters(self) -> list[Parameter]:
        """Give back the memory of gathered parameters and whole gradients; return the shards.

        The next step takes it again, so shards that were written to are gathered anew.
        """
        self._watch.written()
        self._gatherer.give_back()
        self._reducer.pool.clear()
        self._links.give_back()
        give_back_freed()
        return self.parameters()

    def zero_grad(self) -> None:
        """Forget all gradients, those that were not synced too."""
        for shard in self._shards.values():
            shard.grad = None
        self._reducer.forget()
        self._backward.forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward inside the block add to whole gradients on this rank, without a message.

        The next backward outside, or `sync_gradients`, reduces the sum.  Whole gradients cost
        memory: without this block, each backward adds to the shards' gradients.
        """
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def sync_gradients(self) -> None:
        """Collective: reduce what backwards under `no_sync` have added up."""
        self._backward.recover()
        self._reducer.sync()
        self._watch.reduced()

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Collective: in the block all parameters are whole, and forward sends no message.

        For what not all ranks do alike: sampling on one of them, or unequal numbers of batches.
        Values are to be read only, and backward is not to be run.
        """
        self._backward.recover()
        self._watch.gathered()
        self._gatherer.hold()
        try:
            yield
        finally:
            self._gatherer.let_go()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Return {path in the module: this rank's shard}, the very arrays in use."""
        return {name: shard.data for name, shard in self._shards.items()}

    def load_state_dict(self, shards: Mapping[str, Any]) -> None:
        """Copy what state_dict() gave on this rank into the shards."""
        self._watch.written()
        state.load_shards(self._shards, shards)

    def full_state_dict(self) -> dict[str, Array]:
        """Collective: return {path in the module: whole array}, on every rank.

        Whole over `comm`: what tensor parallelism cuts stays cut.
        """
        self._watch.adopt()
        found = state.gather_state(self._units, self._links)
        return {name: found[name] for name in self._names}

    def load_full_state_dict(self, whole: Mapping[str, Any]) -> None:
        """Copy this rank's parts of what full_state_dict() gave, on every rank, without a message.

        Raises ConfigError naming what is missing, unexpected, or of another shape.
        """
        self._watch.written()
        state.load_state(self._units, whole)

    def shard_metadata(self) -> list[state.ShardInfo]:
        """Return who holds which elements of each parameter, in the module's order."""
        found = {name: [] for name in self._names}  # type: dict[str, list[state.ShardInfo]]
        for entry in state.describe(self._units):
            found[entry.name].append(entry)
        return [entry for entries in found.values() for entry in entries]

    def memory(self) -> Memory:
        """Return the bytes of all arrays of this FSDP on this rank, as they are now."""
        return measure(self._units, self._gatherer, self._reducer, self._links)

    def memory_stats(self) -> dict[str, float]:
        """Return total_param_memory_mb, local_shard_memory_mb, peak_allgather_memory_mb,
        memory_saved_mb, peak_memory_mb (2^20 bytes): of the whole parameters, of this rank's
        shards, of the buffers that they were gathered in so far, of what this rank need not keep,
        and the most of parameters, gradients and messages together.
        """
        return self.memory().stats()

    def memory_reduction_percent(self) -> float:
        """Return how much of the parameters this rank need not keep, in percent."""
        return self.memory().reduction_percent

    # -- life ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Collective: give the module its whole parameters back and free the communicators.

        The shards are of no use then.  A second call does nothing.
        """
        if not self._wrapped:
            return
        self.zero_grad()
        self._backward.recover()
        self._watch.adopt()
        self._at_the_end.remove()
        self._reducer.close()
        while self._wrapped:
            boundary.unwrap(self._wrapped.pop())
        self._gatherer.rest()
        for unit in self._units:
            unit.restore(state.whole_values(unit, self._links))
        self._links.destroy()

    def __enter__(self) -> "FSDP":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error the other ranks may never come to free it
            self.destroy()


def _described(members: Sequence[Named]) -> list[tuple[Any, ...]]:
    """Return what must be alike on all ranks."""
    return [(name, p.data.shape, p.data.dtype.name, p.requires_grad) for name, p in members]


def _at_the_end(sharded: FSDP) -> Any:
    """Call `_end_backward` after every backward, as long as somebody holds the module."""
    held = weakref.ref(sharded)

    def end() -> None:
        alive = held()
        if alive is not None:
            alive._end_backward()

    handle = after_backward(end)
    weakref.finalize(sharded, handle.remove)
    return handle
