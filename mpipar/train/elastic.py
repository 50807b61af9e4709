"""`mpipar train --elastic`: when ranks die, the others go on with what they hold.

    dp 0   rank 0  rank 1   step 7 ─ update ─ step 8 ─ error ──┐
    dp 1   rank 2  rank 3   step 7 ─ update ─ step 8 ─ killed  ┴─ mesh of 0 and 1: step 8 ─ update

All ranks agree before each update that all are there and have the gradients: it is taken by all, or
by none.  So after a death the weights and moments of the living are those of one step, and the
global batch of the next is taken again, as a run on the smaller mesh would.  Of the mesh dp
shrinks; pp, cp and tp stay whole, and each rank keeps its part of the model, so nothing is sent:

    the places (pp, cp, tp) with their living replicas      new dp = the fewest of a place
    0: ranks 0, 2     1: rank 3 (rank 1 is dead)            dp 1: ranks 0 and 3; rank 2 leaves

Where no replica is left of some part, as with --fsdp, all load the newest checkpoint.
"""

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import numpy as np
from mpi4py import MPI

from mpipar import autograd
from mpipar.comm import roster, survive
from mpipar.comm.node import world_ranks
from mpipar.errors import ConfigError, PeerError, explain
from mpipar.optim import Optimizer
from mpipar.parallel.mesh import Mesh
from mpipar.train.agree import listed, mark
from mpipar.train.config import TrainConfig
from mpipar.train.held import Held
from mpipar.train.launch import command, mpi_library
from mpipar.train.report import Row
from mpipar.train.step import Streak

Place = tuple[int, int, int]  # pp, cp, tp: which part of the model, and of a sequence


class Survivor(NamedTuple):
    """What a living rank tells the others."""

    rank: int  # in the job
    place: Place
    done: int  # its last update was that of this step; -1: it has no state


class Course:
    """What of a run outlives its mesh.

    done: the last step whose update was taken.  kept: this rank's state after it, or None.
    """

    def __init__(self, world: MPI.Intracomm) -> None:
        """Take all ranks that there are."""
        self.world = world
        self.rows: list[Row] = []
        self.done = -1
        self.kept: list[np.ndarray] | None = None
        self.streak = Streak(1)
        self.place: Place = (0, 0, 0)
        self._agreed = False  # whether the error came from the agreement itself
        self._holds: Callable[[], list[np.ndarray]] | None = None

    def begin(self, mesh: Mesh, held: Held, optimizer: Optimizer, resume: Callable[[], int]) -> int:
        """Collective: take the state that was kept, or that of the checkpoint; return its step."""
        self._holds = lambda: arrays_of(held, optimizer)
        self.place = (mesh.coords.pp, mesh.coords.cp, mesh.coords.tp)
        if self.kept is None:
            self.done = resume()
        else:
            for array, old in zip(self._holds(), self.kept, strict=True):
                array[...] = old
            self.kept = None
        self.rows = [row for row in self.rows if row["step"] <= self.done]
        return self.done

    def commit(self) -> None:
        """Collective: raise PeerError on every rank unless all ranks are there."""
        self._agreed = True
        if not survive.agree(self.world, True):
            raise PeerError("a rank is gone")
        self._agreed = False

    def recover(self, error: Exception, config: TrainConfig) -> TrainConfig | None:
        """Collective over the living: make of them the new `world`; return the settings for it.

        None: this rank is not needed any more.  Raises the error itself if no rank is gone, and
        ConfigError on every rank if too few are left.
        """
        if not survive.tells(error, self.world):
            raise error
        self.kept = None if self._holds is None else self._holds()
        self._holds = None
        _forget_frames(error)
        autograd.start_afresh()
        before = world_ranks(self.world)
        survive.leave_all(self.world)
        if not self._agreed:
            survive.agree(self.world, False)  # others may be about to take the update
        self._agreed = False
        shape, whole = (config.pp, config.cp, config.tp), config.fsdp == "none"
        told, order, keeps = self._meet(shape, whole)
        if not order:
            part, rule = config.model_part(), f"{len(told)} of {len(before)} ranks are left"
            rule += f", and a copy of the model takes pp x cp x tp = {part}"
            fix = "Start more ranks, and go on with --resume"
            speaker = min(one.rank for one in told)
            raise mark(ConfigError(explain("elastic", True, rule, fix)), speaker)
        if not keeps:
            self.kept = None
        if self.world == MPI.COMM_NULL:
            return None
        if self.world.rank == 0:
            lost = sorted({*before} - {one.rank for one in told})
            _say(lost, len(order), len(told) - len(order), told[0].done if keeps else None)
        return replace(config, dp=len(order) // config.model_part())

    def _meet(self, shape: Place, whole: bool) -> tuple[list[Survivor], list[int], bool]:
        """Collective over the living: let them know of each other; set `world`, null to leave.

        Returns what they told, and what `arrange` makes of it.  Begins again if more die meanwhile.
        """
        mine = Survivor(MPI.COMM_WORLD.rank, self.place, -1 if self.kept is None else self.done)
        while True:
            living, made = survive.shrink(self.world), MPI.COMM_NULL
            told, order, keeps, fine = [mine], list[int](), False, True
            try:
                told = living.allgather(mine)
                order, keeps = arrange(told, shape, whole)
                stays = living.rank in order
                key = order.index(living.rank) if stays else 0
                made = living.Split(0 if stays else MPI.UNDEFINED, key)
            except MPI.Exception:
                fine = False
            if survive.agree(living, fine):
                self.world = cast(MPI.Intracomm, made)
                return told, order, keeps
            living.Revoke()
            self.world = living


def arrange(told: Sequence[Survivor], shape: Place, whole: bool) -> tuple[list[int], bool]:
    """Return who of the living makes the new mesh, in its order, and whether they keep their state.

    shape: sizes of (pp, cp, tp); whole: a rank's state is that of its place, not a shard of it.
    """
    places = list(product(*map(range, shape)))
    living = {place: [i for i, one in enumerate(told) if one.place == place] for place in places}
    dp = min(map(len, living.values()))
    if whole and dp > 0 and len({one.done for one in told}) == 1 and told[0].done >= 0:
        order = [
            living[pp, cp, tp][replica]
            for pp in range(shape[0])
            for replica in range(dp)
            for cp in range(shape[1])
            for tp in range(shape[2])
        ]
        return order, True
    return list(range(len(told) // len(places) * len(places))), False


def require_support(ranks: int) -> None:
    """Raise ConfigError unless this job can go on without some of its ranks."""
    if survive.supported():
        return
    library = mpi_library()
    rule = f"it needs Open MPI started with --with-ft ulfm, and this job runs on {library}"
    if library == "Open MPI":
        rule += " without it"
    start = f"{command(ranks, 'Open MPI')} --with-ft ulfm mpipar train --elastic"
    raise ConfigError(
        explain("elastic", True, rule, f"Start {start}, or leave it out and use --save, --resume")
    )


def arrays_of(held: Held, optimizer: Optimizer) -> list[np.ndarray]:
    """Return the very arrays of weights and optimiser, in one order on all ranks of a place."""
    return [*(param.data for param in held.parameters()), *optimizer.state_dict().values()]


def _forget_frames(error: BaseException) -> None:
    """Let go of what the calls that failed hold: modules, their hooks, and their graph."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    gc.collect()


def _say(lost: Sequence[int], ranks: int, surplus: int, done: int | None) -> None:
    """Print which ranks are gone, and how it goes on."""
    members = roster.members()
    who = [f"process {members[r].pid} on {members[r].host}" for r in lost if r < len(members)]
    state = (
        "from the newest checkpoint, or the start"
        if done is None
        else f"with what they hold of step {done}"
    )
    leave = f", {surplus} leave" if surplus else ""
    text = f"mpipar: lost {listed(lost)} ({', '.join(who)}): {ranks} go on {state}{leave}"
    print(text, file=sys.stderr, flush=True)
