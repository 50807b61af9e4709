"""What "auto" takes on several nodes, and in how many parts."""

import pytest

from mpipar.comm import choice
from mpipar.comm.node import arrange
from tests.launch import launch

NOTHING_MEASURED = choice.Table({})


def chosen(nbytes: int, keys: list[int]) -> str:
    nodes = arrange(keys, 0)
    return choice.choose("all_reduce", nbytes, len(keys), nodes, NOTHING_MEASURED)


def test_several_ranks_on_several_nodes_take_two_levels() -> None:
    for keys in ([0, 0, 1, 1], [0] * 4 + [1] * 4, [0, 0, 0, 1], [0, 1, 1]):
        assert chosen(1 << 24, keys) == "hierarchical"
        assert chosen(1 << 15, keys) == "hierarchical"
        assert chosen(1 << 12, keys) == "recursive_doubling"


def test_one_level_where_there_are_not_two() -> None:
    assert chosen(1 << 24, [0] * 8) == "direct"
    assert chosen(1 << 24, [0] * 9) == "ring"
    assert chosen(1 << 24, list(range(8))) == "ring"
    assert chosen(1 << 24, [0, 1, 0, 1]) == "ring"  # ranks of a node are not consecutive
    assert chosen(1 << 15, list(range(8))) == "recursive_doubling"


def test_large_vectors_are_cut_into_parts_unless_ranks_share_cores() -> None:
    mib = 1 << 20
    assert [choice.parts(n, None, False) for n in (1, mib // 8, mib, 2 * mib, 64 * mib)] == [
        1, 1, 2, 4, 4,
    ]  # fmt: skip
    assert choice.parts(64 * mib, None, True) == 1
    assert choice.parts(mib, mib // 3, True) == choice.parts(mib, mib // 3, False) == 4
    assert choice.parts(mib, 1, False) == 64


CODE = """
import numpy as np, mpipar as mp
from mpi4py import MPI
world = MPI.COMM_WORLD
for segment_bytes in (None, 10_000):
    with mp.Communicator(world, segment_bytes=segment_bytes) as comm:
        for n in (1, 7, 20_001):
            for op in ("max", "mean"):
                draws = [np.random.default_rng((r, n)).standard_normal(n) for r in range(comm.size)]
                x = draws[comm.rank].copy()
                fold = {"max": np.max, "mean": np.mean}[op]
                for out in (None, np.empty(n), x):
                    y = comm.all_reduce(x, op, out=out, algorithm="hierarchical")
                    np.testing.assert_allclose(y, fold(draws, axis=0), rtol=1e-12, atol=1e-13)
                assert len(set(world.allgather(y.tobytes()))) == 1
                handles = [comm.all_reduce(draws[comm.rank] * i, algorithm="hierarchical",
                                           async_op=True) for i in range(3)]
                for i, handle in reversed(list(enumerate(handles))):
                    expected = np.sum(draws, axis=0) * i
                    np.testing.assert_allclose(handle.wait(), expected, rtol=1e-11, atol=1e-12)
if world.rank == 0:
    print("fine")
"""


@pytest.mark.parametrize(
    ("layout", "synchronous"), [("0,0,1,1", "0"), ("0,0,0,1", "1"), ("0,1,2,2,2", "0")]
)
def test_parts_on_real_ranks(layout: str, synchronous: str) -> None:
    env = {"MPIPAR_FAKE_NODES": layout, "MPIPAR_SYNCHRONOUS_SENDS": synchronous}
    result = launch(len(layout.split(",")), ["-c", CODE], timeout=90, env=env)
    assert result.returncode == 0, result.stderr
    assert "fine" in result.stdout
