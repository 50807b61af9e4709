"""FSDP: what lies where, what is sent when, 16 bits, and what goes wrong."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import ConfigError, MismatchError, StateError
from mpipar.models.config import ModelConfig
from mpipar.parallel.fsdp import NothingToOffloadWarning, config
from mpipar.parallel.inject import factories
from tests.mpi.helpers import SIZES, backward, full, model, tokens

# -- memory ----------------------------------------------------------------------------------------


def arrays_of(net: Any) -> int:
    """Return the bytes of the distinct memory that parameters, shards and gradients lie in."""
    found: dict[int, int] = {}
    for param in [*net.module.parameters(), *net.parameters()]:
        for array in (param.data, param.grad):
            while array is not None and array.base is not None:
                array = array.base
            if array is not None:
                found[id(array)] = array.nbytes
    return sum(found.values())


def test_between_steps_there_are_only_shards(comm: mp.Communicator) -> None:
    net = mp.FSDP(model(), comm, full(min_param_size=0), op="sum")
    p = comm.size
    whole = 8 * sum(np.prod(param.spec.shape) for param in net.module.parameters())
    assert arrays_of(net) <= whole / p + 6 * 8 * p
    backward(net, comm)
    optimizer = mp.optim.AdamW(net.parameters())
    optimizer.step()
    net.shard_parameters()
    moments = sum(a.nbytes for a in optimizer.state_dict().values())
    padding = 6 * 8 * p
    assert arrays_of(net) <= 2 * (whole / p + padding)
    assert moments <= 2 * (whole / p + padding) + 8 * len(net.parameters())
    memory = net.memory()
    assert memory.shards + memory.gradients == arrays_of(net)
    assert memory.gathered == 0
    stats = net.memory_stats()
    assert stats["total_param_memory_mb"] * 2**20 == whole
    assert stats["local_shard_memory_mb"] * 2**20 <= whole / p + padding
    assert net.memory_reduction_percent() == pytest.approx(100 * (1 - 1 / p), abs=2)
    if p > 1:  # the rest of the model, and two blocks
        rest = sum(np.prod(v.shape) for n, v in model().state_dict().items() if "blocks" not in n)
        blocks_of_two = 2 * (whole / 8 - rest) / SIZES["layers"]
        assert stats["peak_allgather_memory_mb"] * 2**20 <= 8 * (rest + blocks_of_two) + 3 * padding
    net.destroy()


def test_freed_parameters_cannot_be_used(comm: mp.Communicator) -> None:
    with mp.FSDP(model(), comm, full(), op="sum") as net:
        backward(net, comm)
        weight = net.module.blocks[0].mlp.up.weight
        if comm.size > 1:
            assert weight.data.size == 0
            with pytest.raises(StateError, match=r"blocks\.0\.mlp\.up\.weight.*its unit"):
                net.module.blocks[0].mlp.up(mp.Tensor(np.zeros((1, 16))))
        with net.whole_parameters():
            np.testing.assert_array_equal(weight.data.shape, weight.spec.shape)
    assert weight.data.shape == weight.spec.shape


def test_metadata_covers_every_element_once(comm: mp.Communicator) -> None:
    for flatten in (True, False):
        with mp.FSDP(model(), comm, full(flatten_parameters=flatten), op="sum") as net:
            shards = dict(net.named_parameters())
            seen: dict[str, int] = {}
            for entry in net.shard_metadata():
                assert entry.start == seen.get(entry.name, 0)
                seen[entry.name] = entry.stop
                if entry.rank == comm.rank and np.prod(entry.shape) >= 20:
                    assert shards[entry.name].data.size == entry.stop - entry.start
            whole = model().state_dict()
            assert seen == {name: value.size for name, value in whole.items()}
            for name, value in net.full_state_dict().items():
                np.testing.assert_array_equal(value, whole[name])
                spec = shards[name].spec
                np.testing.assert_array_equal(spec.take(value), shards[name].data)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, None])
def test_units_are_gathered_ahead_and_in_one_order(
    comm: mp.Communicator, prefetch: bool | None
) -> None:
    """Ahead if that is asked for, as this model's units are large beside what a rank keeps."""
    with mp.FSDP(model(), comm, full(prefetch=prefetch), op="sum") as net:
        if comm.size == 1:
            return
        events: list[str] = []
        gatherer = net._gatherer
        started, used = gatherer._start, gatherer.use

        def start(place: Any) -> None:
            if not (place.current or place.handles):
                events.append(f"+{place.unit.label}")
            started(place)

        def use(unit: Any) -> None:
            events.append(unit.label)
            used(unit)

        gatherer._start, gatherer.use = start, use
        before = comm.calls.copy()
        backward(net, comm)
        text = " ".join(events).replace("unit ", "")
        if prefetch:  # 3 and 2 are still there when backward begins
            assert text == "+whole +rest +0 0 +1 1 +2 2 +3 3 3 2 +1 1 +0 0"
        else:
            assert text == "+whole +rest +0 0 1 +1 2 +2 3 +3 3 2 +2 1 +1 0 +0"
        sent = comm.calls - before
        assert sent["all_gather"] == 1 + 4 + (2 if prefetch else 3)
        assert sent["reduce_scatter"] == 1 + 4
        assert sent["all_reduce"] == 2  # small gradients; what was used
        gatherer._start, gatherer.use = started, used
        before = comm.calls.copy()
        with net.no_sync():
            backward(net, comm)
        assert not (comm.calls - before)["reduce_scatter"]


def test_ranks_may_use_different_parameters(comm: mp.Communicator) -> None:
    class Choosing(mp.nn.Module):
        def __init__(self) -> None:
            names = ("a", "b", "c")
            self.blocks = [mp.nn.Linear(5, 5, name=n, seed=0, dtype="float64") for n in names]
            self.extra = mp.nn.Linear(5, 5, name="d", seed=0, dtype="float64")

        def forward(self, x: Any, only: bool) -> Any:
            for unit in self.blocks:
                x = x + unit(x) * (0.0 if only else 1.0)
            return x.sum() if only else (self.extra(x) * x).sum()

    x = mp.Tensor(np.linspace(-1, 1, 10).reshape(2, 5))
    with mp.FSDP(Choosing(), comm, full(min_param_size=0), op="sum") as net:
        net(x, only=comm.rank != 0).backward()
        mp.Tensor(np.zeros(())).backward()  # one of something else
        alone = Choosing()
        alone(x, only=False).backward()
        for param, shard in zip(alone.parameters(), net.parameters(), strict=True):
            np.testing.assert_allclose(shard.grad, shard.spec.take(param.grad), atol=1e-12)


def test_blocks_may_be_recomputed_in_backward(comm: mp.Communicator) -> None:
    class Recomputing(mp.nn.Module):
        def __init__(self, again: bool) -> None:
            self.again = again
            self.blocks = [
                mp.nn.Linear(7, 7, name=f"b{n}", seed=0, dtype="float64") for n in range(4)
            ]

        def forward(self, x: Any) -> Any:
            for unit in self.blocks:
                x = mp.recompute(unit, x).tanh() if self.again else unit(x).tanh()
            return x.sum()

    x = np.linspace(-1, 1, 14).reshape(2, 7)
    with mp.FSDP(Recomputing(True), comm, full(min_param_size=0)) as net:
        net(mp.Tensor(x)).backward()
        alone = Recomputing(False)
        alone(mp.Tensor(x)).backward()
        for param, shard in zip(alone.parameters(), net.parameters(), strict=True):
            np.testing.assert_allclose(shard.grad, shard.spec.take(param.grad), atol=1e-12)


def test_whole_parameters_need_no_message(comm: mp.Communicator) -> None:
    wanted = model()(tokens()[:, :-1]).data
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        with mp.FSDP(model(), comm, full(strategy), op="sum") as net:
            backward(net, comm)
            with net.whole_parameters(), mp.no_grad():
                before = comm.calls.copy()
                for _ in range(comm.rank):  # as often as each rank likes
                    np.testing.assert_allclose(net(tokens()[:, :-1]).data, wanted, atol=1e-12)
                assert comm.calls == before
            with mp.no_grad():
                np.testing.assert_allclose(net(tokens()[:, :-1]).data, wanted, atol=1e-12)


def test_bits_do_not_depend_on_messages(world: MPI.Intracomm) -> None:
    found = []
    for bucket_mb, flatten in ((1e-6, True), (0.001, True), (25, True), (25, False)):
        how = full(bucket_mb=bucket_mb, flatten_parameters=flatten)
        with (
            mp.Communicator(world, reproducible=True) as comm,
            mp.FSDP(model("float32"), comm, how) as net,
        ):
            optimizer = mp.optim.AdamW(net.parameters())
            for step in range(2):
                optimizer.zero_grad()
                backward(net, comm, step)
                optimizer.step()
            found.append({n: v.tobytes() for n, v in net.full_state_dict().items()})
    assert all(bits == found[0] for bits in found)


# -- tensor parallel -------------------------------------------------------------------------------


def test_with_tensor_parallel_layers(world: MPI.Intracomm) -> None:
    tp = 2 if world.size % 2 == 0 else 1
    alone = model()
    optimizer = mp.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(3):
        alone.zero_grad()
        loss, count = alone.loss(tokens(step)[:, :-1], tokens(step)[:, 1:])
        (loss / count).backward()
        norm = mp.clip_grad_norm(alone.parameters(), 0.5)
        optimizer.step()
    with mp.Mesh(world, tp=tp) as mesh:
        cut = model(**factories(mesh))
        with mp.FSDP(cut, mesh.dp, full(), op="sum") as net:
            optimizer = mp.optim.AdamW(net.parameters(), lr=0.01)
            for step in range(3):
                optimizer.zero_grad()
                backward(net, mesh.dp, step)
                same = mp.clip_grad_norm(net.parameters(), 0.5, mesh)
                optimizer.step()
            assert same == pytest.approx(norm, rel=1e-10)
            for (name, shard), whole in zip(
                net.named_parameters(), alone.parameters(), strict=True
            ):
                wanted = shard.spec.take(whole.data)
                np.testing.assert_allclose(shard.data, wanted, atol=1e-12, err_msg=name)


# -- 16 bits ---------------------------------------------------------------------------------------


def relative_error(net: Any, plain: Any, scale: float) -> float:
    """Return |g - exact| / |exact| over this rank's gradients of `net`, which are scaled."""
    error = size = 0.0
    for shard, param in zip(net.parameters(), plain.parameters(), strict=True):
        exact = shard.spec.take(param.grad)
        error += float(((shard.grad / scale - exact) ** 2).sum())
        size += float((exact**2).sum())
    return float(np.sqrt(error / size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPTIMIZER"])
def test_sixteen_bits(world: MPI.Intracomm, dtype: str, strategy: str) -> None:
    plain = model("float32")
    loss_sum, count = plain.loss(tokens()[:, :-1], tokens()[:, 1:])
    (loss_sum / count).backward()
    with mp.Communicator(world) as comm:
        for reduce_dtype in (None, "float32"):
            how = full(strategy, mixed_precision=dtype, reduce_dtype=reduce_dtype)
            with mp.FSDP(model("float32"), comm, how, op="sum") as net:
                optimizer = mp.optim.SGD(net.parameters(), lr=1e-4)
                scaler = mp.LossScaler(comm, scale=2.0**10, interval=3)
                weight = dict(net.named_parameters())["blocks.0.mlp.down.weight"].data
                before = weight.copy()
                for step in range(4):
                    optimizer.zero_grad()
                    backward(net, comm, step, scaler.scale)
                    assert all(p.grad.dtype == np.float32 for p in net.parameters())
                    if step == 0:
                        limit = 0.05 if dtype == "bfloat16" else 0.005
                        assert relative_error(net, plain, scaler.scale) < limit
                    assert scaler.step(optimizer)
                assert scaler.scale == 2.0**11
                assert net.module.norm.weight.data.dtype.name == dtype
                assert (
                    not weight.size or (weight != before).mean() > 0.9
                )  # 16 bits would round such steps off


def test_a_step_that_overflows_on_one_rank_is_taken_by_none(comm: mp.Communicator) -> None:
    with mp.FSDP(model("float32"), comm, full(mixed_precision="float16"), op="sum") as net:
        optimizer = mp.optim.AdamW(net.parameters(), lr=0.01)
        before = {name: value.copy() for name, value in net.state_dict().items()}
        scaler = mp.LossScaler(comm, scale=2.0**20)
        with np.errstate(all="ignore"):
            backward(net, comm, scale=1e30 if comm.rank == comm.size - 1 else 1.0)
            assert not scaler.step(optimizer)
        assert scaler.scale == 2.0**19
        assert scaler.skipped == 1
        for name, value in net.state_dict().items():
            np.testing.assert_array_equal(value, before[name])


# -- state and mistakes ----------------------------------------------------------------------------


def test_state_goes_out_and_in(comm: mp.Communicator) -> None:
    one = mp.FSDP(model(), comm, full(), op="sum")
    other = model()
    for param in other.parameters():
        param.data[...] *= 1.5 + comm.rank  # those of rank 0 count
    two = mp.FSDP(other, comm, full("SHARD_GRAD_OP"), op="sum")
    for name, value in two.full_state_dict().items():
        np.testing.assert_array_equal(value, model().state_dict()[name] * 1.5)
    two.load_full_state_dict(one.full_state_dict())
    assert backward(one, comm) == pytest.approx(backward(two, comm), rel=1e-12)
    three = mp.FSDP(model(), comm, full(), op="sum")
    three.load_state_dict({name: value * 2 for name, value in one.state_dict().items()})
    for name, value in three.full_state_dict().items():
        np.testing.assert_array_equal(value, model().state_dict()[name] * 2)
    state = one.full_state_dict()
    state["extra"] = state.pop("norm.weight")
    with pytest.raises(ConfigError, match=r"extra is unexpected.*norm\.weight is missing"):
        one.load_full_state_dict(state)
    for net in (one, two, three):
        net.destroy()


def test_mistakes_have_names(world: MPI.Intracomm) -> None:
    with mp.Communicator(world) as comm:
        net = mp.FSDP(model(), comm)
        with pytest.raises(ConfigError, match="destroy"):
            mp.FSDP(net.module, comm)
        net.destroy()
        net.destroy()
        made = model()
        with pytest.raises(ConfigError, match=r"units\[0\]"):
            mp.FSDP(made, comm, units=[model()])
        with pytest.raises(ConfigError, match=r"units.1.*another unit"):
            mp.FSDP(made, comm, units=[made.blocks[0], made.blocks[0].mlp])
        with pytest.raises(ConfigError, match="op"):
            mp.FSDP(made, comm, op="max")
        if comm.size > 1:
            sizes = {**SIZES, "dim": 16 if comm.rank else 32}
            with pytest.raises(MismatchError, match="other parameters"):
                mp.FSDP(mp.models.build(ModelConfig(model="gpt2", **sizes)), comm)
        how = full("HYBRID_SHARD", shard_size=comm.size + 1)
        with pytest.raises(ConfigError, match="divide"):
            mp.FSDP(made, comm, how)
        config._said.clear()
        if comm.rank == 0:
            with pytest.warns(NothingToOffloadWarning, match="nothing to offload"):
                mp.FSDP(made, comm, full(cpu_offload=True)).destroy()
        else:
            mp.FSDP(made, comm, full(cpu_offload=True)).destroy()


def test_it_looks_like_its_module(comm: mp.Communicator) -> None:
    shown = repr(model())
    with mp.FSDP(model(), comm, full(min_param_size=0)) as net:
        assert {"parameters", "full_state_dict", "zero_grad", "blocks", "loss"} <= set(dir(net))
        assert repr(comm) in repr(net)
        assert "FULL_SHARD, op='mean'" in repr(net)
        assert [line.strip() for line in repr(net).splitlines()[1:-1]] == [
            line.strip() for line in shown.splitlines()
        ]
