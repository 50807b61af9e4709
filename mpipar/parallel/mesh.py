"""Mesh: the ranks of a job as a grid with the axes pp, dp, cp and tp.

Ranks are laid out row-major with tp fastest (Megatron-LM, section 3; Llama 3, section 3.3.4): the
ranks that talk most sit next to each other.  Eight ranks as pp=2, dp=2, cp=1, tp=2:

             tp 0  tp 1                     mesh.tp of rank 5: ranks 4 5
    pp 0  dp 0  0     1                     mesh.dp of rank 5: ranks 5 7
          dp 1  2     3                     mesh.pp of rank 5: ranks 1 5
    pp 1  dp 0  4     5                     mesh.group("dp", "tp") of rank 5: ranks 4 5 6 7
          dp 1  6     7

Experts live on the ranks of dp and cp together: this plane of dp*cp ranks is cut into blocks of ep
neighbours.  A block is the axis "ep"; the ranks that hold the same experts are the axis "edp".

The groups of a mesh are made with Create_group, which only the members call: one Communicator an
axis in the constructor, and one for each other combination when `group` is first called for it.
"""

from collections.abc import Iterator
from math import log, prod
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from mpipar.errors import ConfigError, DestroyedError, explain
from mpipar.parallel.communicator import Communicator

AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "tp")


class Axes(NamedTuple):
    """One number for each axis of a mesh: its sizes, or the coordinates of a rank."""

    pp: int
    dp: int
    cp: int
    tp: int


def resolve(ranks: int, pp: int, dp: int | None, cp: int, tp: int, ep: int) -> Axes:
    """Return the sizes of the axes for `ranks` ranks; dp=None becomes what is left.

    Raises ConfigError if a size is not a positive integer, if the sizes do not multiply to `ranks`
    (the message names the nearest that do), or if ep does not divide dp*cp.
    """
    for name, size in {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}.items():
        if size is None and name == "dp":
            continue
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ConfigError(
                explain(name, size, "the size of a mesh axis is a positive integer", "Pass >= 1")
            )
    rest = pp * cp * tp
    shape = Axes(pp, max(ranks // rest, 1) if dp is None else dp, cp, tp)
    if prod(shape) != ranks:
        given = f"pp={pp} dp={'?' if dp is None else dp} cp={cp} tp={tp}"
        rule = f"the sizes must multiply to the number of ranks, {ranks}"
        if dp is None:
            rule = f"pp*cp*tp = {rest} must divide the number of ranks, {ranks}"
        raise ConfigError(explain("mesh", given, rule, _ways_out(ranks, shape)))
    plane = shape.dp * shape.cp
    if plane % ep:
        fits = ", ".join(str(d) for d in range(1, plane + 1) if plane % d == 0)
        raise ConfigError(explain("ep", ep, f"ep divides dp*cp = {plane}", f"Choose from {fits}"))
    return shape


def _ways_out(ranks: int, shape: Axes) -> str:
    """Say how `ranks` ranks get a mesh; one that was started alone was meant to have company."""
    near = "; or ".join(" ".join(f"{n}={s}" for n, s in a.items()) for a in nearest(ranks, shape))
    if ranks > 1:
        return f"Nearest that work: {near}"
    start = f"Start it with `mpiexec -n {prod(shape)} python PROGRAM`"
    return f"{start}, the mpiexec of this Python's environment. On one rank: {near}"


def nearest(ranks: int, shape: Axes, count: int = 3) -> list[dict[str, int]]:
    """Return the `count` shapes of `ranks` ranks that change the given sizes least (as ratios)."""

    def cuts(n: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (n,)
            return
        for first in (d for d in range(1, n + 1) if n % d == 0):
            for others in cuts(n // first, axes - 1):
                yield (first, *others)

    def distance(cut: tuple[int, ...]) -> float:
        return sum(abs(log(a / b)) for a, b in zip(cut, shape, strict=True))

    chosen = sorted(cuts(ranks, len(AXES)), key=distance)[:count]
    return [dict(zip(AXES, cut, strict=True)) for cut in chosen]


def members(sizes: tuple[int, ...], rank: int, varying: tuple[bool, ...]) -> list[int]:
    """Return the ranks of a row-major grid that differ from `rank` in the varying axes only."""
    grid = np.arange(prod(sizes)).reshape(sizes)
    here = np.unravel_index(rank, sizes)
    cut = tuple(slice(None) if v else int(i) for v, i in zip(varying, here, strict=True))
    return [int(r) for r in grid[cut].ravel()]


class Mesh:
    """Communicators for every axis of a grid of ranks.

    `world` holds all ranks; `pp`, `dp`, `cp`, `tp` and `ep` hold the ranks that differ from this
    one in that axis only, in ascending order.  `shape` has the sizes, `coords` the place of this
    rank.  A context manager.
    """

    world: Communicator
    pp: Communicator
    dp: Communicator
    cp: Communicator
    tp: Communicator
    ep: Communicator

    def __init__(
        self,
        raw: MPI.Intracomm,
        pp: int = 1,
        dp: int | None = None,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        **options: Any,
    ) -> None:
        """Collective: make the mesh from all ranks of `raw`, any mpi4py communicator.

        `options` (device, algorithm, reproducible, check, timeout, ...) go to every Communicator.

        Raises ConfigError on every rank, before any communicator is made, if the sizes do not fit
        the number of ranks (see `resolve`) or if the ranks passed different sizes.
        """
        if not isinstance(raw, MPI.Intracomm) or raw == MPI.COMM_NULL:
            rule = "it is an mpi4py intracommunicator"
            raise ConfigError(explain("raw", raw, rule, "Pass MPI.COMM_WORLD"))
        _require_agreement(raw, (pp, dp, cp, tp, ep))
        self.shape = resolve(raw.size, pp, dp, cp, tp, ep)
        here = np.unravel_index(raw.rank, self.shape)
        self.coords = Axes(*(int(i) for i in here))
        self._expert_shape = (self.shape.pp, self.shape.dp * self.shape.cp // ep, ep, self.shape.tp)
        self._options = options
        self._groups: dict[tuple[str, ...], Communicator] = {}
        self._destroyed = False
        self.world = Communicator(raw, name="world", **options)
        for axis in (*AXES, "ep"):
            setattr(self, axis, self.group(axis))

    def group(self, *axes: str) -> Communicator:
        """Return the Communicator of the ranks that differ from this one in `axes` only.

        Collective over those ranks the first time; after that the same object comes back.  The
        order of the names does not matter: ranks are in ascending order.  "ep" and "edp" go with
        "pp" and "tp", not with the "dp" and "cp" that they cut in another way.

        Raises ConfigError for an unknown axis, and DestroyedError after `destroy()`.
        """
        if self._destroyed:
            raise DestroyedError(explain("mesh", self.shape, "it was destroyed", "Make a new one"))
        sizes, names = self._grid(axes)
        wanted = tuple(name for name in names if name in axes)
        if wanted not in self._groups:
            if len(wanted) == len(AXES):
                return self.world
            ranks = members(sizes, self.world.rank, tuple(name in axes for name in names))
            self._groups[wanted] = self._make(ranks, "+".join(wanted))
        return self._groups[wanted]

    def communicators(self) -> list[Communicator]:
        """Return every communicator that was made for this mesh, each once."""
        return [self.world, *self._groups.values()]

    def axis_size(self, axis: str) -> int:
        """Return how many ranks differ in `axis` only; no communication."""
        sizes, names = self._grid((axis,))
        return sizes[names.index(axis)]

    def destroy(self) -> None:
        """Collective: free every communicator of the mesh.  A second call does nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        for comm in reversed([self.world, *self._groups.values()]):
            comm.destroy()
        self._groups.clear()

    def __enter__(self) -> "Mesh":
        """Return the mesh itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Destroy the mesh, unless an error is on its way: other ranks may not get here then."""
        if kind is None:
            self.destroy()

    def __repr__(self) -> str:
        """Return sizes and coordinates."""
        sizes = " ".join(f"{n}={s}" for n, s in zip(AXES, self.shape, strict=True))
        return f"Mesh({sizes} ep={self._expert_shape[2]}, coords={tuple(self.coords)})"

    def _grid(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the view of the grid, sizes and names, in which all of `axes` appear."""
        for names, sizes in ((AXES, tuple(self.shape)), (EXPERT_AXES, self._expert_shape)):
            if axes and set(axes) <= set(names):
                return sizes, names
        rule = f"a group is named by axes of {AXES} or of {EXPERT_AXES}"
        raise ConfigError(explain("axes", axes, rule, "Name at least one, all from one of the two"))

    def _make(self, ranks: list[int], name: str) -> Communicator:
        """Return a Communicator over these ranks; its members call this."""
        raw = cast(MPI.Intracomm, self.world.process_group.raw)
        everyone = raw.Get_group()
        chosen = everyone.Incl(ranks)
        made = raw.Create_group(chosen)
        chosen.Free()
        everyone.Free()
        try:
            return Communicator(made, name=name, **self._options)  # duplicates what it is given
        finally:
            made.Free()


def _require_agreement(raw: MPI.Intracomm, sizes: tuple[Any, ...]) -> None:
    """Raise ConfigError on every rank if the ranks passed different sizes.

    One small all-gather: without it, ranks that disagree would wait in different groups forever.
    """
    numbers = [0 if size is None else _as_number(size) for size in sizes]
    mine = np.array(numbers, np.int64)
    everyone = np.empty((raw.size, len(mine)), np.int64)
    raw.Allgather(mine, everyone)
    for rank in np.flatnonzero((everyone != everyone[0]).any(axis=1))[:1]:
        rule = f"all ranks pass the same sizes, but rank {rank} passed {everyone[rank].tolist()}"
        raise ConfigError(
            explain(
                "(pp, dp, cp, tp, ep)", everyone[0].tolist(), rule, "Pass the same on all ranks"
            )
        )


def _as_number(size: Any) -> int:
    """Return a size to compare; -1, which `resolve` refuses too, for what can be none."""
    whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
    return int(size) if whole and 1 <= size < 1 << 31 else -1
