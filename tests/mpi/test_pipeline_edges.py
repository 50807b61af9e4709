"""Pipelines with what users may pass: files, several inputs, 16 bits, and what cannot work."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import nn
from mpipar.arrays import dtype as dtype_of
from mpipar.autograd import Tensor, no_grad
from mpipar.bench.pipeline import as_json, measure
from mpipar.errors import (
    BufferMismatchError,
    ConfigError,
    DtypeMismatchError,
    MismatchError,
    ScheduleError,
    StateError,
)
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline import Pipeline
from mpipar.schedule import draw
from mpipar.schedule.pipeline import make, simulate, to_csv

X = np.random.default_rng(0).normal(size=(8, 4))


def layer(number: int, dtype: str = "float64") -> nn.Linear:
    return nn.Linear(4, 4, seed=1, name=f"layer{number}", dtype=dtype)


def total(y: Tensor, *_: Any) -> Tensor:
    return (y * y).sum()


def dense(count: int, x: Any = X) -> tuple[float, list[nn.Linear]]:
    layers = [layer(number) for number in range(count)]
    y = x
    for one in layers:
        y = one(y)
    loss = total(y)
    loss.backward()
    return loss.item(), layers


def check(pipe: Pipeline, layers: list[nn.Linear], rtol: float = 1e-12) -> None:
    for number, module in pipe.stages.items():
        for own, other in zip(module.parameters(), layers[number].parameters(), strict=True):
            found, expected = (np.asarray(param.grad, np.float64) for param in (own, other))
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


# -- schedules from files ------------------------------------------------------------------------


def test_a_schedule_from_a_file(comm: Communicator, shared_path: Path) -> None:
    """Only rank 0 reads it; the sizes are those of the file."""
    p = comm.size
    path = shared_path / f"own{p}{comm.ranks[0]}.csv"
    if comm.rank == 0:
        path.write_text(to_csv(make("interleaved", p, 4, 2)))
    comm.barrier()
    loss, layers = dense(2 * p)
    with Pipeline(layer, comm, str(path), 4) as pipe:
        assert pipe.schedule.name == path.name
        np.testing.assert_allclose(pipe.step(X, X, total), loss, rtol=1e-12)
        check(pipe, layers)
    with pytest.raises(ConfigError, match="a schedule of 4 micro-batches, and 3 are asked for"):
        Pipeline(layer, comm, str(path), 3)
    with pytest.raises(ConfigError, match="the file cannot be read"):
        Pipeline(layer, comm, str(shared_path / "none.csv"), 3)


def test_a_file_with_a_wrong_schedule(comm: Communicator, shared_path: Path) -> None:
    """The table is shown on every rank, with the cell marked."""
    p = comm.size
    good = to_csv(make("gpipe", p, 2))
    bad = {
        "missing": (good.replace("0B1", ""), r"0B1 is missing(?s:.*)\["),
        "doubled": (good.replace("0B1", "0B1,0B1"), r"0B1 is doubled(?s:.*)\[0B1\]"),
        "stuck": (good.replace("0F0", "x").replace("0B0", "0F0").replace("x", "0B0"), "deadlock"),
    }
    for name, (text, match) in bad.items():
        path = shared_path / f"{name}{p}{comm.ranks[0]}.csv"
        if comm.rank == 0:
            path.write_text(text)
        comm.barrier()
        with pytest.raises(ScheduleError, match=match):
            Pipeline(layer, comm, str(path), 2)


# -- settings ------------------------------------------------------------------------------------


def test_settings_that_cannot_work(comm: Communicator) -> None:
    p = comm.size
    for stages, schedule, m, match in [
        (layer, "2f2b", 4, "the pipeline schedules are gpipe"),
        (layer, "1f1b", 0, "at least 1"),
        (layer, "1f1b", 2.5, "at least 1"),
        (layer, 7, 4, "it must be one of gpipe"),
        (nn.Linear(4, 4), "1f1b", 4, "a list of modules, or a function"),
        ([layer(n) for n in range(p + 1)], "1f1b", 4, f"has {p} stages"),
        ([], "interleaved", 4, "equally many stages"),
        ([1] * p, "1f1b", 4, "a stage must be a Module"),
    ]:
        with pytest.raises(ConfigError, match=match):
            Pipeline(stages, comm, schedule, m)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="interleaved for any number"):
        Pipeline(layer, comm, "1f1b", 4, chunks=2)
    with pytest.raises(ConfigError, match=r"Pass mesh\.pp"):
        Pipeline(layer, None)  # type: ignore[arg-type]
    if p > 1:
        with pytest.raises(MismatchError, match="other settings than rank 0"):
            Pipeline(layer, comm, "gpipe", 4 + comm.rank // (p - 1))


def test_an_error_in_one_stage_is_raised_on_all_ranks(comm: Communicator) -> None:
    def stage(number: int) -> nn.Linear:
        return nn.Linear(4, 0 if number == comm.size - 1 else 4)

    with pytest.raises(ConfigError, match="out_features"):
        Pipeline(stage, comm, "gpipe", 2)


def test_any_error_of_the_function_of_stages_is_raised_on_all_ranks(comm: Communicator) -> None:
    def stage(number: int) -> nn.Linear:
        if number == comm.size - 1:
            raise FileNotFoundError("no weights here")
        return nn.Linear(4, 4)

    text = rf"stages\({comm.size - 1}\) raised FileNotFoundError: no weights here"
    with pytest.raises(ConfigError, match=text) as caught:
        Pipeline(stage, comm, "gpipe", 2)
    if comm.rank == comm.size - 1:
        assert isinstance(caught.value.__cause__, FileNotFoundError)
    Pipeline(layer, comm, "gpipe", 2).destroy()  # the communicator goes on


def test_parameters_of_one_name_but_other_shapes(comm: Communicator) -> None:
    if comm.size == 1:
        return
    with pytest.raises(MismatchError, match=r"same\.(weight|bias)"):
        Pipeline(lambda n: nn.Linear(4, 4 + n, name="same"), comm, "gpipe", 2)


# -- steps ---------------------------------------------------------------------------------------


def test_batches_that_cannot_work(comm: Communicator) -> None:
    """All ranks raise, and the pipeline works on."""
    last = comm.size - 1
    loss, _ = dense(comm.size)
    with Pipeline(layer, comm, "1f1b", 4) as pipe:
        with pytest.raises(ConfigError, match=r"microbatches=4.*but the batch has 3"):
            pipe.step(X[:3], X[:3], total)
        with pytest.raises(ConfigError, match="inputs=None"):
            pipe.step(None, X, total)
        with pytest.raises(ConfigError, match="targets=None"):
            pipe.step(X, None, total)
        with pytest.raises(ConfigError, match="loss_fn=None"):
            pipe.step(X, X, total if comm.rank != last else None)
        with pytest.raises(BufferMismatchError, match="as many as inputs, 8"):
            pipe.step(X, X[:7], total)
        with pytest.raises(BufferMismatchError, match="one number of rows"):
            pipe.step((X, X[:7]), X, total)
        with pytest.raises(StateError, match="Call forward first"):
            pipe.backward(X)
        pipe.forward(X)
        with pytest.raises(BufferMismatchError, match="that of the output"):
            pipe.backward(X[:5])
        with no_grad():
            pipe.forward(X)
        with pytest.raises(StateError, match="with gradients on"):
            pipe.backward(X)
        np.testing.assert_allclose(pipe.step(X, X, total), loss, rtol=1e-12)


class Two(nn.Module):
    """Takes two inputs; all but the first stage take one."""

    def __init__(self, number: int) -> None:
        self.inner = layer(number)

    def forward(self, x: Any, scale: Any = 1.0) -> Tensor:
        return self.inner(x * scale)


def test_several_inputs_and_targets(comm: Communicator) -> None:
    scale = np.arange(1.0, 9.0)[:, None]
    loss, layers = dense(comm.size, X * scale)
    with Pipeline(Two, comm, "1f1b", 3) as pipe:
        found = pipe.step((X, scale), (X, scale), lambda y, a, b: total(y) + 0 * (a * b).sum())
        np.testing.assert_allclose(found, loss, rtol=1e-12)
        check(pipe, layers)


def test_other_shapes_in_later_steps(comm: Communicator) -> None:
    """Inputs of more dimensions: headers travel again, once for each kind."""
    with Pipeline(layer, comm, "1f1b", 2) as pipe:
        for x in (X, X.reshape(4, 2, 4), X, X[:5], X.reshape(2, 2, 2, 4)):
            loss, layers = dense(comm.size, x)
            pipe.zero_grad()
            np.testing.assert_allclose(pipe.step(x, x, total), loss, rtol=1e-12)
            check(pipe, layers)


def test_an_input_that_wants_a_gradient(comm: Communicator) -> None:
    x = Tensor(X, requires_grad=True)
    dense(comm.size, x)
    own = Tensor(X, requires_grad=True)
    with Pipeline(layer, comm, "zb1p", 3) as pipe:
        pipe.step(own, X, total)
    if comm.rank == 0:
        np.testing.assert_allclose(np.asarray(own.grad), np.asarray(x.grad), rtol=1e-12)
    else:
        assert own.grad is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations_of_other_dtypes(comm: Communicator, dtype: str) -> None:
    loss, layers = dense(comm.size)
    x = X.astype(dtype_of(dtype))
    with Pipeline(lambda n: layer(n, dtype), comm, "1f1b", 3) as pipe:
        found = pipe.step(x, X, total)
        rtol = {"float32": 1e-5, "float16": 3e-2, "bfloat16": 0.3}[dtype]
        np.testing.assert_allclose(found, loss, rtol=rtol)
        check(pipe, layers, rtol)


class Odd(nn.Module):
    """Returns what a stage must not return."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def forward(self, x: Any) -> Any:
        return {"array": X, "integers": Tensor(np.arange(4)), "pair": (x, x)}[self.kind]


def test_what_a_stage_must_not_return() -> None:
    """On one rank, where the error is raised; others would be ended by the launcher."""
    with Communicator(MPI.COMM_SELF) as alone:
        for kind, match in (("array", "stage 0 must return one Tensor"), ("pair", "one Tensor")):
            with Pipeline([Odd(kind)], alone, "gpipe", 2) as pipe:
                with pytest.raises(ConfigError, match=match) as caught:
                    pipe.step(X, X, total)
                assert "in 0F0 of the pipeline: stage 0" in caught.value.__notes__[0]
                with pytest.raises(StateError, match="after an error in an earlier step"):
                    pipe.step(X, X, total)
        for loss_fn, error in [
            (lambda y, _: y, ConfigError),
            (lambda y, _: 1.0, ConfigError),
            (lambda y, _: Tensor(np.array(1)), DtypeMismatchError),
        ]:
            with Pipeline([layer(0)], alone, "gpipe", 2) as pipe, pytest.raises(error):
                pipe.step(X, X, loss_fn)


def test_stages_tell_when_their_gradients_are_complete(comm: Communicator) -> None:
    for schedule in ("interleaved", "zbv"):
        done: list[tuple[int, bool]] = []

        def note(stage: int, done: list[tuple[int, bool]] = done) -> None:
            done.append((stage, pipe.stages[stage].weight.grad is not None))

        with Pipeline(layer, comm, schedule, 3, on_stage_done=note) as pipe:
            pipe.step(X, X, total)
            assert sorted(done) == [(number, True) for number in sorted(pipe.stages)]


def test_the_benchmark_compares_idle_shares(comm: Communicator) -> None:
    """Its numbers are not judged here, but that all ranks have the same."""
    for schedule in ("1f1b", "zbv"):
        row = measure(comm, schedule, 3, 4, 4)
        assert (row.ranks, row.microbatches) == (comm.size, 3)
        assert 0 <= row.simulated_idle < 1
        assert 0 <= row.idle < 1
        assert len(set(comm.process_group.raw.allgather(row))) == 1
    (entry,) = as_json([row])
    assert entry["schedule"] == "zbv"


def test_the_measured_timeline(comm: Communicator) -> None:
    from mpipar.parallel.pipeline.timeline import measured

    with Pipeline(layer, comm, "zb1p", 4) as pipe:
        pipe.step(X, X, total)
        timeline = pipe.gather_timeline()
        plain = pipe.schedule.computation()
        for rank in range(comm.size):
            spans = timeline.of(rank)
            assert [one.name for one in spans] == [str(a) for a in plain.actions[rank]]
            for before, after in pairwise(spans):
                assert 0 <= before.start <= before.stop <= after.start
        times = measured(timeline)
        assert len(times) == 3 * 4 * comm.size
        posted = set(measured(pipe.gather_timeline(messages=True))) - set(times)
        assert posted == {a for row in pipe.schedule.actions for a in row if not a.computes}
        result = simulate(plain, measured=times)
        assert [one.name for one in result.timeline.of(0)] == [s.name for s in timeline.of(0)]
        assert draw(timeline).count("rank") >= comm.size
