"""GradientSynchronizer: any order of submits, any use of parameters, clear errors."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import (
    BufferMismatchError,
    ConfigError,
    DtypeMismatchError,
    MismatchError,
    StateError,
)

SHAPES = [(3, 2), (5,), (), (0,), (7, 7), (4, 0, 2), (1, 1)]
TINY = 1e-6  # of a bucket, in 2^20 bytes: one parameter each


@pytest.fixture(params=["1", "0"], ids=["shared", "private"])
def comm(
    raw: MPI.Intracomm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A group whose ranks share buckets, or do not."""
    monkeypatch.setenv("MPIPAR_WINDOWS", request.param)
    with mp.Communicator(raw) as made:
        yield made


def parameters(shapes: Any = SHAPES, dtype: str = "float64") -> list[Any]:
    return [mp.Tensor(np.zeros(shape, dtype), requires_grad=True) for shape in shapes]


def gradient(shape: tuple[int, ...], *key: int) -> np.ndarray:
    return np.random.default_rng(key).standard_normal(shape)


@pytest.mark.parametrize("bucket_mb", [25, 1e-4, TINY])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_every_rank_submits_in_an_order_of_its_own(
    comm: mp.Communicator, op: str, bucket_mb: float
) -> None:
    params = parameters()
    with mp.GradientSynchronizer(comm, bucket_mb, op) as synchronizer:
        synchronizer.register(params)
        for step in range(5):
            for i in np.random.default_rng((comm.rank, step)).permutation(len(params)):
                synchronizer.submit(params[i], gradient(SHAPES[i], comm.rank, i, step))
            assert synchronizer.sync()
            for i, param in enumerate(params):
                total = sum(gradient(SHAPES[i], r, i, step) for r in range(comm.size))
                expected = total / (comm.size if op == "mean" else 1)
                np.testing.assert_allclose(param.grad, expected, rtol=1e-13, atol=1e-15)


def test_random_uses_and_random_submits(comm: mp.Communicator) -> None:
    """Each parameter is used by a random set of ranks, up to its number of times."""
    p, r = comm.size, comm.rank
    params = parameters()
    uses = [1 + i % 3 for i in range(len(params))]
    with mp.GradientSynchronizer(comm, 1e-4) as synchronizer:
        for param, times in zip(params, uses, strict=True):
            synchronizer.register(param, uses=times)
        for step in range(8):
            plan = np.random.default_rng(step)
            times = np.array([[plan.integers(0, u + 1) for u in uses] for _ in range(p)])
            times[:, plan.integers(len(params))] = 0
            mine = np.repeat(np.arange(len(params)), times[r])
            for i in np.random.default_rng((r, step)).permutation(mine):
                synchronizer.submit(params[i], np.full(SHAPES[i], r + 1.0))
            synchronizer.sync()
            for i, param in enumerate(params):
                if not times[:, i].any():
                    assert param.grad is None
                else:
                    total = sum(times[q, i] * (q + 1.0) for q in range(p)) / p
                    np.testing.assert_allclose(param.grad, np.full(SHAPES[i], total), rtol=1e-14)


def test_rank_0_uses_one_and_rank_1_the_other(world: MPI.Intracomm) -> None:
    w1, w2 = parameters([(4,), (4,)])
    with mp.Communicator(world) as comm, mp.GradientSynchronizer(comm, TINY) as synchronizer:
        synchronizer.register([w1, w2])
        for _ in range(2):
            if comm.rank < 2:
                synchronizer.submit((w1, w2)[comm.rank], np.full(4, 6.0))
            synchronizer.sync()
            np.testing.assert_allclose(w1.grad, np.full(4, 6.0 / comm.size))
            if comm.size > 1:
                np.testing.assert_allclose(w2.grad, np.full(4, 6.0 / comm.size))
            else:
                assert w2.grad is None


def test_a_tied_parameter_of_two_stages(comm: mp.Communicator) -> None:
    """The gradient is the mean over ranks of the sum over both uses."""
    (tied, other) = parameters([(6, 2), (3,)])
    with mp.GradientSynchronizer(comm) as synchronizer:
        synchronizer.register(tied, uses=2)
        synchronizer.register(other)
        synchronizer.submit(tied, np.full((6, 2), comm.rank + 1.0))
        synchronizer.submit(other, np.ones(3))
        assert not synchronizer.submitted(tied)
        synchronizer.submit(tied, np.full((6, 2), 10.0))
        assert synchronizer.submitted(tied)
        synchronizer.sync()
    mean = np.mean([q + 1.0 + 10.0 for q in range(comm.size)])
    np.testing.assert_allclose(tied.grad, np.full((6, 2), mean), rtol=1e-14)


def test_nothing_crosses_other_collectives(comm: mp.Communicator) -> None:
    """Ranks start buckets at different places among the group's own collectives in flight."""
    p, r = comm.size, comm.rank
    params = parameters([(1000,)] * 4)
    with mp.GradientSynchronizer(comm, TINY) as synchronizer:
        synchronizer.register(params)
        for step in range(3):
            handles = []
            for i in range(4):
                if (i + step + r) % 2:
                    synchronizer.submit(params[i], np.full(1000, float(i * p + r)))
                handles.append(comm.all_reduce(np.full(1000, float(i)), async_op=True))
            for i in range(4):
                if not (i + step + r) % 2:
                    synchronizer.submit(params[i], np.full(1000, float(i * p + r)))
            for i in range(4)[:: 1 if r % 2 else -1]:
                np.testing.assert_array_equal(handles[i].wait(), np.full(1000, float(i * p)))
            synchronizer.sync()
            for i, param in enumerate(params):
                np.testing.assert_allclose(param.grad, np.full(1000, i * p + (p - 1) / 2))


def test_later_buckets_are_in_the_order_that_rank_0_saw(comm: mp.Communicator) -> None:
    """Two of four parameters fit in a bucket; which two do can be seen from their memory."""
    params = parameters([(16,)] * 4)
    with mp.GradientSynchronizer(comm, 256 / 2**20, shared=False) as synchronizer:
        synchronizer.register(params)
        shared = []
        for _ in range(2):
            for i in [2, 0, 3, 1] if comm.rank == 0 else [0, 1, 2, 3]:
                synchronizer.submit(params[i], np.ones(16))
            synchronizer.sync()
            shared.append([[a.grad.base is b.grad.base for a in params] for b in params])
    assert shared[0][0] == [True, True, False, False]
    later = [True, False, True, False] if comm.size > 1 else shared[0][0]
    assert shared[1][0] == later


def test_messages_of_a_step(comm: mp.Communicator) -> None:
    """One all-reduce a bucket that holds something, and one that tells what was used."""
    params = parameters([(128,), (128,), (64,), (0,)])  # 1 KB buckets: [0] [1] [2, 3]
    with mp.GradientSynchronizer(comm, 1 / 1024) as synchronizer:
        synchronizer.register(params)
        for _ in range(3):
            before = comm.calls["all_reduce"]
            for param in params:
                synchronizer.submit(param, np.ones(param.shape))
            synchronizer.sync()
            assert comm.calls["all_reduce"] - before == (4 if comm.size > 1 else 0)


def test_gradients_are_views_and_copies_are_not(comm: mp.Communicator) -> None:
    a, b = parameters([(2, 3), (4,)])
    with mp.GradientSynchronizer(comm) as synchronizer:
        synchronizer.register([a, b])
        assert synchronizer.snapshot(a) is None
        mine = np.full((2, 3), comm.rank + 1.0)
        synchronizer.submit(a, mine)
        np.testing.assert_array_equal(synchronizer.snapshot(a), mine)
        synchronizer.sync()
        np.testing.assert_array_equal(mine, np.full((2, 3), comm.rank + 1.0))
        kept = synchronizer.snapshot(a)
        assert a.grad.base is not None
        assert kept.base is None
        np.testing.assert_array_equal(kept, a.grad)
        assert b.grad is None
        assert synchronizer.device_of(a) == "cpu"


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_narrow_on_the_wire_with_wide_sums(comm: mp.Communicator, wire: str) -> None:
    (w,) = parameters([(1000,)], "float32")
    with mp.GradientSynchronizer(comm, wire_dtype=wire) as synchronizer:
        synchronizer.register(w)
        synchronizer.submit(w, np.full(1000, 30000.0, np.float32))  # p times it is inf in float16
        synchronizer.sync()
        assert w.grad.dtype == np.float32
        np.testing.assert_allclose(w.grad, np.full(1000, 30000.0), rtol=2**-8)
        values = np.random.default_rng(1).standard_normal((comm.size, 1000)).astype(np.float32)
        synchronizer.submit(w, values[comm.rank])
        synchronizer.sync()
        np.testing.assert_allclose(w.grad, values.mean(0), atol=2**-6)


def test_several_dtypes(comm: mp.Communicator) -> None:
    import ml_dtypes

    dtypes = ["float32", "float64", ml_dtypes.bfloat16, "float16", "float64"]
    params = [mp.Tensor(np.zeros(3, d), requires_grad=True) for d in dtypes]
    with mp.GradientSynchronizer(comm, TINY) as synchronizer:
        synchronizer.register(params)
        for _ in range(2):
            for param in params[:: 1 if comm.rank else -1]:
                synchronizer.submit(param, np.full(3, comm.rank, param.dtype))
            synchronizer.sync()
            for param in params:
                assert param.grad.dtype == param.dtype
                mean = np.full(3, (comm.size - 1) / 2).astype(param.dtype)
                np.testing.assert_array_equal(param.grad, mean)


def test_more_parameters_between_steps(comm: mp.Communicator) -> None:
    a, b = parameters([(3,), (2,)])
    with mp.GradientSynchronizer(comm) as synchronizer:
        synchronizer.register([a])
        for params in ([a], [a, b]):
            synchronizer.register(params)
            for param in params:
                synchronizer.submit(param, np.ones(param.shape))
            synchronizer.sync()
            assert all((param.grad == 1).all() for param in params)


def test_errors_of_a_submit(comm: mp.Communicator) -> None:
    w, other = parameters([(2, 3), (2,)])
    w2 = mp.nn.Parameter(np.zeros(3), mp.Spec.replicated("head.weight", (3,)))
    synchronizer = mp.GradientSynchronizer(comm)
    synchronizer.register([w, w2])
    with pytest.raises(StateError, match="not started"):
        synchronizer.submit(w, np.ones((2, 3)))
    with synchronizer:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"shape \(2,\).*not registered"):
                synchronizer.submit(other, np.ones(2))
            with pytest.raises(BufferMismatchError, match=r"grad.shape=\(3, 2\).*\(2, 3\)"):
                synchronizer.submit(w, np.ones((3, 2)))
            with pytest.raises(DtypeMismatchError, match=r"float32.*float64"):
                synchronizer.submit(w, np.ones((2, 3), np.float32))
            with pytest.raises(DtypeMismatchError, match=r"float32.*head.weight"):
                synchronizer.submit(w2, np.ones(3, np.float32))
            synchronizer.submit(w, np.full((2, 3), 2.0))
            with pytest.raises(StateError, match="1 times in this step and is synced"):
                synchronizer.submit(w, np.ones((2, 3)))
            with pytest.raises(StateError, match="between steps"):
                synchronizer.register([other])
            synchronizer.sync()
            np.testing.assert_array_equal(w.grad, np.full((2, 3), 2.0))
    synchronizer.close()
    with pytest.raises(StateError, match="not started"):
        synchronizer.sync()
    for wrong in ({"bucket_mb": 0}, {"op": "max"}, {"wire_dtype": "float64"}, {"steps": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            mp.GradientSynchronizer(comm, **wrong)
    with pytest.raises(ConfigError, match="uses=0"):
        synchronizer.register(w, uses=0)


@pytest.mark.parametrize("early", [True, False])
def test_other_parameters_on_one_rank(world: MPI.Intracomm, early: bool) -> None:
    """An error on every rank, whether they were registered before or after `start`."""
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with mp.Communicator(world) as comm:
        odd = comm.rank == comm.size - 1
        params = parameters([(3,), (2 + odd,)])
        synchronizer = mp.GradientSynchronizer(comm, TINY)
        if early:
            synchronizer.register(params)
            with pytest.raises(MismatchError, match=rf"ranks \[{comm.size - 1}\].*than rank 0"):
                synchronizer.start()
        else:
            synchronizer.start()
            synchronizer.register(params)
            with pytest.raises(MismatchError, match=rf"ranks \[{comm.size - 1}\].*than rank 0"):
                submit_all(synchronizer, params)
        comm.barrier()
        synchronizer.close()


def submit_all(synchronizer: mp.GradientSynchronizer, params: list[Any]) -> None:
    for param in params:
        synchronizer.submit(param, np.ones(param.shape))
    synchronizer.sync()
