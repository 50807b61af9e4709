"""PowerSGD against the paper's algorithm in float64, on any number of ranks."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError, MismatchError

SHAPES = [(24, 16), (16,), (), (0,), (5, 6, 4), (30, 3), (1, 9), (4, 0, 2)]
ALL = {"min_compression_rate": 0.0}  # compress every matrix


def parameters(shapes: Any = SHAPES, dtype: str = "float64") -> list[Any]:
    return [mp.Tensor(np.zeros(shape, dtype), requires_grad=True) for shape in shapes]


def gradient(shape: tuple[int, ...], *key: int) -> np.ndarray:
    return np.random.default_rng(key).standard_normal(shape)


def matrix_of(shape: tuple[int, ...], of_rank: int, *key: int) -> np.ndarray:
    """Return a gradient that has, as a matrix, the given rank."""
    rows = shape[0]
    left, right = gradient((rows, of_rank), *key), gradient((of_rank, np.prod(shape[1:])), *key, 1)
    return (left @ right).reshape(shape)


class Paper:
    """Algorithms 1 and 2 of the paper for one matrix, with all ranks in one process."""

    def __init__(self, right: np.ndarray, ranks: int) -> None:
        self.right = right.T.astype(np.float64)  # (m, r)
        self.errors: list[Any] = [0.0] * ranks

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        deltas = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        left, _ = np.linalg.qr(sum(delta @ self.right for delta in deltas))
        each = [delta.T @ left for delta in deltas]
        self.errors = [d - left @ q.T for d, q in zip(deltas, each, strict=True)]
        self.right = sum(each) / len(each)
        return left @ self.right.T


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_it_is_the_algorithm_of_the_paper(comm: mp.Communicator, op: str) -> None:
    shape, ranks = (24, 16), comm.size
    (param,) = params = parameters([shape])
    compressed = mp.PowerSGD(params, comm, rank=3, op=op, seed=5, **ALL)
    paper = Paper(compressed.state_dict()["0.right"], ranks)
    for step in range(6):
        param.grad = gradient(shape, comm.rank, step)
        assert compressed.sync()
        expected = paper.step([gradient(shape, r, step) for r in range(ranks)])
        scale = ranks if op == "sum" else 1
        np.testing.assert_allclose(param.grad, expected * scale, rtol=1e-9, atol=1e-11)
        error = compressed.state_dict()["0.error"]
        np.testing.assert_allclose(error, paper.errors[comm.rank], rtol=1e-9, atol=1e-11)


def test_it_is_exact_from_the_rank_of_the_mean_on(comm: mp.Communicator) -> None:
    """Full rank, and a mean of rank 2 compressed to 2; what is not compressed is the mean too."""
    for rank, of_rank in ((24, None), (2, 2)):
        shapes = SHAPES if of_rank is None else [(24, 16), (5, 6, 4), (7,)]
        params = parameters(shapes)
        compressed = mp.PowerSGD(params, comm, rank=rank, **ALL)
        for step in range(3):
            means = []
            for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
                every = [gradient(shape, r, i, step) for r in range(comm.size)]
                if of_rank is not None and len(shape) > 1:  # each has full rank, their mean has not
                    mean = sum(every) / comm.size
                    every = [g - mean + matrix_of(shape, of_rank, i, step) for g in every]
                param.grad = every[comm.rank]
                means.append(sum(every) / comm.size)
            compressed.sync()
            for param, mean in zip(params, means, strict=True):
                np.testing.assert_allclose(param.grad, mean, rtol=1e-9, atol=1e-11)


def test_what_came_out_and_what_is_owed_add_up(comm: mp.Communicator) -> None:
    """Error feedback: nothing is lost, and what is owed stays bounded."""
    shape, steps = (24, 16), 60
    (param,) = params = parameters([shape])
    compressed = mp.PowerSGD(params, comm, rank=1, **ALL)
    mean = sum(gradient(shape, r) for r in range(comm.size)) / comm.size
    total, distances = np.zeros(shape), []
    for step in range(1, steps + 1):
        param.grad = gradient(shape, comm.rank)
        compressed.sync()
        total += param.grad
        owed = comm.all_reduce(compressed.state_dict()["0.error"], "mean")
        np.testing.assert_allclose(total + owed, step * mean, rtol=1e-9, atol=1e-10)
        distances.append(np.linalg.norm(total / step - mean) / np.linalg.norm(mean))
    assert distances[-1] < 0.35
    assert distances[-1] < distances[0] / 2
    assert distances[-1] * steps < 2 * distances[steps // 2] * (steps // 2)  # bounded: as 1/steps


def test_the_result_does_not_depend_on_the_number_of_ranks(comm: mp.Communicator) -> None:
    shapes = [(24, 16), (5, 6, 4), (7,)]
    ours, alone = parameters(shapes), parameters(shapes)
    with mp.Communicator(MPI.COMM_SELF) as single:
        many, one = mp.PowerSGD(ours, comm, rank=2, **ALL), mp.PowerSGD(alone, single, 2, **ALL)
        for step in range(4):
            for i, shape in enumerate(shapes):
                every = [gradient(shape, r, i, step) for r in range(comm.size)]
                ours[i].grad, alone[i].grad = every[comm.rank], sum(every) / comm.size
            many.sync()
            one.sync()
            for a, b in zip(ours, alone, strict=True):
                np.testing.assert_allclose(a.grad, b.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_ranks_get_the_same_bits_in_every_run(world: MPI.Intracomm, dtype: str) -> None:
    shapes = [(64, 48), (48,), (1030, 70)]
    runs = []
    with mp.Communicator(world) as comm:
        for _ in range(2):
            params = parameters(shapes, dtype)
            compressed = mp.PowerSGD(params, comm, rank=4)
            for step in range(3):
                for i, param in enumerate(params):
                    param.grad = gradient(shapes[i], comm.rank, i, step).astype(dtype)
                compressed.sync()
            runs.append(b"".join(param.grad.tobytes() for param in params))
    assert runs[0] == runs[1]
    assert len(set(world.allgather(runs[0]))) == 1
    assert params[0].grad.dtype == dtype
    assert np.isfinite(params[0].grad).all()


def test_the_bytes_are_those_of_the_formula(
    comm: mp.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    plain = comm.all_reduce

    def counting(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(x.nbytes)
        return plain(x, *args, **kwargs)

    shapes = [(64, 48), (48,), (32, 4, 8), (6, 5), (3,)]
    params = parameters(shapes, "float32")
    compressed = mp.PowerSGD(params, comm, rank=4, start_step=1, min_compression_rate=2)
    monkeypatch.setattr(comm, "all_reduce", counting)
    elements = sum(int(np.prod(shape)) for shape in shapes)
    message_1 = len(shapes) + 48 + 6 * 5 + 3 + 4 * (64 + 32)  # (6, 5) is not worth it
    message_2 = 4 * (48 + 32)
    assert compressed.whole_bytes == 4 * (len(shapes) + elements)
    assert compressed.message_bytes == 4 * (message_1 + message_2)
    for expected in ([compressed.whole_bytes], [4 * message_1, 4 * message_2]):
        for i, param in enumerate(params):
            param.grad = gradient(shapes[i], comm.rank, i).astype("float32")
        compressed.sync()
        assert seen == expected
        seen.clear()


def test_steps_before_the_first_compressed_one_are_exact(comm: mp.Communicator) -> None:
    params = parameters()
    compressed = mp.PowerSGD(params, comm, rank=1, start_step=2, **ALL)
    for step in range(3):
        for i, param in enumerate(params):
            param.grad = gradient(SHAPES[i], comm.rank, i, step)
        compressed.sync()
        every = [gradient(SHAPES[0], r, 0, step) for r in range(comm.size)]
        exact = np.allclose(params[0].grad, sum(every) / comm.size, rtol=1e-12, atol=1e-14)
        assert exact == (step < 2)


def test_state_goes_on_where_it_was(comm: mp.Communicator) -> None:
    def run(steps: range, compressed: mp.PowerSGD, params: list[Any]) -> list[np.ndarray]:
        results = []
        for step in steps:
            for i, param in enumerate(params):
                param.grad = gradient(SHAPES[i], comm.rank, i, step)
            compressed.sync()
            results.append(params[0].grad.copy())
        return results

    params = parameters()
    compressed = mp.PowerSGD(params, comm, rank=2, start_step=1, **ALL)
    run(range(3), compressed, params)
    saved = {key: array.copy() for key, array in compressed.state_dict().items()}
    expected = run(range(3, 6), compressed, params)
    resumed = mp.PowerSGD(params, comm, rank=2, start_step=1, seed=9, **ALL)
    resumed.load_state_dict(saved)
    assert resumed.steps == 3
    np.testing.assert_array_equal(run(range(3, 6), resumed, params), expected)
    other = mp.PowerSGD(params, comm, rank=1, **ALL)
    with pytest.raises(ConfigError, match="of another shape"):
        other.load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"missing.*0\.error"):
        other.load_state_dict({"steps": saved["steps"]})


def test_parameters_that_few_ranks_use(comm: mp.Communicator) -> None:
    """Zeros where a rank has none; None, and nothing forgotten, where no rank has one."""
    shape = (24, 16)
    first, second = params = parameters([shape, shape])
    compressed = mp.PowerSGD(params, comm, rank=1, **ALL)
    first.grad = gradient(shape, comm.rank) if comm.rank == comm.size - 1 else None
    assert compressed.sync()
    owed = comm.all_reduce(compressed.state_dict()["0.error"], "mean")
    expected = gradient(shape, comm.size - 1) / comm.size
    np.testing.assert_allclose(first.grad + owed, expected, rtol=1e-10, atol=1e-12)
    assert second.grad is None
    first.grad = None
    assert not compressed.sync()
    assert first.grad is None
    kept = comm.all_reduce(compressed.state_dict()["0.error"], "mean")
    np.testing.assert_array_equal(kept, owed)
    for param in params:  # Q had nothing to do, and works again
        param.grad = gradient(shape, comm.rank)
    compressed.sync()
    assert np.linalg.norm(second.grad) > 0
    assert np.linalg.norm(compressed.state_dict()["1.right"]) > 0


def test_what_is_not_finite_is_seen_and_forgotten(comm: mp.Communicator) -> None:
    shape = (24, 16)
    params = parameters([shape, shape])
    compressed = mp.PowerSGD(params, comm, rank=2, **ALL)
    for bad in (np.nan, np.inf, None):
        for param in params:
            param.grad = gradient(shape, comm.rank)
        if bad is not None and comm.rank == 0:
            params[0].grad[3, 4] = bad
        compressed.sync()
        assert np.isnan(params[0].grad).all() == (bad is not None)
        assert np.isfinite(params[1].grad).all()
    assert np.isfinite(params[0].grad).all()


def test_gradients_with_gaps_are_written_in_place(comm: mp.Communicator) -> None:
    shape = (6, 4, 5)
    (param,) = params = parameters([shape])
    compressed = mp.PowerSGD(params, comm, rank=20, **ALL)
    grad = param.grad = np.zeros((6, 5, 4)).transpose(0, 2, 1)
    grad[...] = gradient(shape, comm.rank)
    compressed.sync()
    assert param.grad is grad
    mean = sum(gradient(shape, r) for r in range(comm.size)) / comm.size
    np.testing.assert_allclose(grad, mean, rtol=1e-9, atol=1e-11)


def test_a_model_learns(world: MPI.Intracomm) -> None:
    """A small regression comes as far as with whole gradients, after DataParallel.no_sync."""
    x, w = gradient((64, 20), 1), gradient((20, 12), 2)
    losses = {}
    for rank in (None, 2):
        with mp.Communicator(world) as comm:
            layer = mp.nn.Linear(20, 12, seed=3, name="layer", dtype="float64")
            model = mp.DataParallel(layer, comm)
            rows = mp.partition.block(64, comm.size, comm.rank)
            optimizer = mp.optim.SGD(layer.parameters(), lr=0.5)
            compressed = mp.PowerSGD(model.module, comm, rank or 1, **ALL)
            for _ in range(40):
                layer.zero_grad()
                with model.no_sync():
                    difference = model(mp.Tensor(x[rows])) - mp.Tensor((x @ w)[rows])
                    (difference * difference).sum().backward(np.asarray(comm.size / 768))
                if rank is None:
                    for param in layer.parameters():
                        param.grad = comm.all_reduce(param.grad, "mean")
                else:
                    compressed.sync()
                optimizer.step()
            residual = x @ w - np.asarray(layer(mp.Tensor(x)))
            losses[rank] = float((residual**2).mean())
            model.destroy()
    assert losses[2] < 2 * losses[None] + 1e-3


def test_mistakes_are_named(comm: mp.Communicator) -> None:
    params = parameters()
    for wrong in (
        {"rank": 0},
        {"rank": 1.5},
        {"start_step": -1},
        {"min_compression_rate": -1},
        {"min_compression_rate": "no"},
        {"op": "max"},
    ):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            mp.PowerSGD(params, comm, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="params"):
        mp.PowerSGD(params[0], comm)
    compressed = mp.PowerSGD(params, comm)
    params[0].grad = np.zeros((3, 3))
    with pytest.raises(BufferMismatchError, match="24, 16"):
        compressed.sync()
    params[0].grad = np.zeros((24, 16), "float32")
    with pytest.raises(DtypeMismatchError, match="float32"):
        compressed.sync()
    if comm.size > 1:
        with pytest.raises(MismatchError, match=rf"ranks \[{comm.size - 1}\]"):
            mp.PowerSGD(params, comm, rank=5 if comm.rank == comm.size - 1 else 4)
