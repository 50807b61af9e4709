"""Mesh on real communicators: every shape of the ranks there are, groups, errors, the end."""

from itertools import product
from math import prod

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.errors import ConfigError, DestroyedError
from mpipar.parallel.mesh import AXES, Mesh, members


def shapes(ranks: int) -> list[tuple[int, ...]]:
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [shape for shape in product(divisors, repeat=4) if prod(shape) == ranks]


def world_ranks(raw: MPI.Intracomm, ranks: list[int]) -> tuple[int, ...]:
    mine, everyone = raw.Get_group(), MPI.COMM_WORLD.Get_group()
    return tuple(MPI.Group.Translate_ranks(mine, ranks, everyone))


def test_every_axis_holds_the_ranks_of_the_grid(raw: MPI.Intracomm) -> None:
    for shape in shapes(raw.size):
        with Mesh(raw, **dict(zip(AXES, shape, strict=True))) as mesh:
            assert mesh.shape == shape
            assert np.ravel_multi_index(mesh.coords, shape) == raw.rank == mesh.world.rank
            for axis in AXES:
                comm = getattr(mesh, axis)
                expected = members(shape, raw.rank, tuple(name == axis for name in AXES))
                assert tuple(comm.ranks) == world_ranks(raw, expected)
                assert comm.rank == getattr(mesh.coords, axis)
                assert comm.size == getattr(mesh.shape, axis) == mesh.axis_size(axis)
                assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3


def test_groups_of_several_axes_are_made_once(raw: MPI.Intracomm) -> None:
    shape = shapes(raw.size)[-2 if raw.size > 1 else -1]
    with Mesh(raw, **dict(zip(AXES, shape, strict=True))) as mesh:
        for axes in (("dp", "cp"), ("dp", "tp"), ("pp", "tp"), ("pp", "dp", "tp")):
            comm = mesh.group(*axes)
            expected = members(shape, raw.rank, tuple(name in axes for name in AXES))
            assert tuple(comm.ranks) == world_ranks(raw, expected)
            assert comm.all_reduce(np.ones(1)) == comm.size
            assert mesh.group(*axes) is comm
            assert mesh.group(*reversed(axes)) is comm
        assert mesh.group("tp") is mesh.tp
        assert mesh.group(*AXES) is mesh.world


def test_only_the_members_make_a_group(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:  # the ranks do it one after another
        for turn in range(raw.size):
            if turn == raw.rank:
                assert mesh.group("cp", "tp").size == 1
            mesh.world.barrier()


def test_experts_cut_the_plane_of_dp_and_cp(raw: MPI.Intracomm) -> None:
    for ep in (d for d in range(1, raw.size + 1) if raw.size % d == 0):
        with Mesh(raw, ep=ep) as mesh:
            first = raw.rank // ep * ep
            assert tuple(mesh.ep.ranks) == world_ranks(raw, list(range(first, first + ep)))
            same = list(range(raw.rank % ep, raw.size, ep))
            assert tuple(mesh.group("edp").ranks) == world_ranks(raw, same)
            assert mesh.group("edp", "ep").size == raw.size
            with pytest.raises(ConfigError, match="dp"):
                mesh.group("dp", "ep")


def test_sizes_that_do_not_fit_are_an_error_on_every_rank(raw: MPI.Intracomm) -> None:
    with pytest.raises(ConfigError, match=f"number of ranks, {raw.size}") as error:
        Mesh(raw, tp=raw.size + 1)
    assert ("Nearest" if raw.size > 1 else "mpiexec -n 2") in str(error.value)
    with pytest.raises(ConfigError, match="ep divides"):
        Mesh(raw, ep=raw.size + 1)
    with pytest.raises(ConfigError, match="positive integer"):
        Mesh(raw, pp=0)


def test_what_is_no_communicator(raw: MPI.Intracomm) -> None:
    for wrong in (MPI.COMM_NULL, None, 4):
        with pytest.raises(ConfigError, match="intracommunicator"):
            Mesh(wrong)


def test_ranks_that_ask_for_different_meshes_all_hear_of_it(raw: MPI.Intracomm) -> None:
    if raw.size == 1:
        return
    last = raw.size - 1
    with pytest.raises(ConfigError, match=f"rank {last} passed"):
        Mesh(raw, tp=raw.size if raw.rank == last else 1)


def test_destroy_twice_is_harmless_and_ends_the_use(raw: MPI.Intracomm) -> None:
    mesh = Mesh(raw)
    mesh.group("dp", "tp")
    mesh.destroy()
    mesh.destroy()
    with pytest.raises(DestroyedError):
        mesh.group("dp", "tp")


def test_unknown_axes(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:
        for axes in ((), ("xp",), ("tp", "xp")):
            with pytest.raises(ConfigError, match="axes"):
                mesh.group(*axes)


def test_options_reach_every_communicator(raw: MPI.Intracomm) -> None:
    with Mesh(raw, reproducible=True, algorithm="direct") as mesh:
        x = np.array([1e16, 1.0, -1e16, 1.0])[raw.rank :: max(raw.size, 1)].sum()
        total = mesh.dp.all_reduce(np.array([x]))
        everyone = raw.allgather(total.tobytes())
        assert len(set(everyone)) == 1
