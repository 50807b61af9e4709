"""mpipar plan: sizes, memory, communication, the search, and the formulas of others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipar import models
from mpipar.cli import main as main_module
from mpipar.cli.main import main
from mpipar.errors import ConfigError
from mpipar.models.config import ModelConfig
from mpipar.plan import communication, compute, published, search
from mpipar.plan import memory as memory_of
from mpipar.plan.communication import Links
from mpipar.plan.layout import Job, Layout, layouts
from mpipar.plan.machine import Machine, read, write
from mpipar.plan.models import NAMED, parameters, sizes
from mpipar.schedule import make, pipeline, simulate
from mpipar.train.config import TrainConfig

TINY = ModelConfig(layers=4, dim=32, heads=4, vocab=64, seq=32)
JOB = Job(TINY, batch=16)
FAST = Machine()


def named(name: str) -> ModelConfig:
    return ModelConfig(**sizes(name))


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-124m", 124.439808),
        ("gpt2-1.5b", 1557.6112),
        ("llama-7b", 6738.415616),
        ("llama-70b", 68976.648192),
        ("llama3-8b", 8030.261248),
    ],
)
def test_models_have_their_published_parameters(name: str, millions: float) -> None:
    assert parameters(named(name)) == round(millions * 1e6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_is_built(family: str, tied: bool) -> None:
    config = replace(TINY, model=family, tied=tied, hidden=96)
    built = models.build(config)
    assert parameters(config) == sum(p.data.size for p in built.parameters())


def test_every_name_is_a_model() -> None:
    for name in NAMED:
        assert named(name).layers
    with pytest.raises(ConfigError, match="gpt2-124m"):
        sizes("gpt5")


# -- layouts -------------------------------------------------------------------------------------


def test_every_layout_is_one_that_training_accepts() -> None:
    found = list(layouts(JOB, 8))
    assert len({layout for layout in found}) == len(found) > 100
    for layout in found:
        assert layout.ranks == 8
        settings: dict[str, Any] = {
            "fsdp": str(layout.fsdp) if layout.fsdp else "none",
            "sequence_parallel": layout.sequence_parallel,
            "recompute": layout.recompute,
            "cp_layout": layout.cp_layout if layout.cp > 1 else None,
            "schedule": layout.schedule if layout.pp > 1 else None,
        }
        if layout.pp > 1:
            settings["microbatches"] = layout.microbatches
            settings["chunks"] = layout.chunks if layout.schedule == "interleaved" else None
        else:
            settings["accumulate"] = layout.microbatches
        mesh = {axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp")}
        train = TrainConfig(
            **mesh, **settings, layers=4, dim=32, heads=4, vocab=64, seq=32, batch=16
        )
        train.validate(8)


@pytest.mark.parametrize(
    ("ranks", "fixed", "words"),
    [
        (8, {"tp": 3}, r"tp=3: it must divide the 8 ranks, .* one of 1, 2, 4"),
        (8, {"pp": 8}, r"pp=8: .* one of the 4 layers.*1, 2, 4"),
        (8, {"dp": 5}, r"dp=5: .* one of 1, 2, 4, 8"),
        (64, {"tp": 1, "cp": 1, "pp": 1}, r"batch=16: each of at least 64 .* --batch 64"),
        (12, {"pp": 4, "tp": 4}, r"ranks=12: pp 4 x tp 4 does not divide"),
        (8, {"fsdp": 3, "pp": 2}, r"ranks=8: no mesh of these ranks has fsdp 3, pp 2"),
        (0, {}, r"ranks=0: a job has at least one rank"),
    ],
)
def test_what_cannot_be_is_said(ranks: int, fixed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(layouts(JOB, ranks, fixed))


# -- memory --------------------------------------------------------------------------------------


def test_weights_gradients_and_optimizer_of_zero_stages() -> None:
    config = replace(TINY, dim=256, vocab=4096)
    job, count = Job(config, 16), parameters(config)
    item = 4
    whole = memory_of.memory(job, Layout(dp=4))
    assert whole.weights == whole.gradients == count * item
    assert whole.optimizer == 2 * count * item
    one = memory_of.memory(job, Layout(dp=4, fsdp=1))
    small = memory_of.largest(job, Layout()).small
    shard = small + (count - small) / 4
    assert (one.weights, one.gradients) == (count * item, count * item)
    assert one.optimizer == 2 * shard * item
    three = memory_of.memory(job, Layout(dp=4, fsdp=3))
    assert three.weights == three.gradients == shard * item
    assert three.buffers > 0
    assert memory_of.memory(job, Layout(dp=4, fsdp=2, microbatches=2)).gradients == count * item


def test_sequence_parallelism_and_recomputation_save_activations() -> None:
    layout = Layout(tp=4)
    plain = memory_of.memory(JOB, layout).activations
    cut = memory_of.memory(JOB, replace(layout, sequence_parallel=True)).activations
    again = memory_of.memory(JOB, replace(layout, recompute=True)).activations
    assert cut < plain
    assert again < plain


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb1p", "zbv"])
def test_a_rank_holds_the_micro_batches_that_the_schedule_has_in_flight(name: str) -> None:
    schedule = pipeline.make(name, 4, 8)
    counts = [max(map(sum, each)) for each in memory_of.live_counts(schedule)]
    assert tuple(counts) == pipeline.peak_live(schedule)


def test_what_the_tape_keeps_of_a_model_and_backward_needs_beside_it() -> None:
    import tracemalloc

    for family in ("gpt2", "llama"):
        config = replace(TINY, model=family, dim=64, seq=64, hidden=128)
        model, job = models.build(config), Job(config, 8)
        tokens = np.random.default_rng(0).integers(0, config.vocab, (8, config.seq))
        model.loss(tokens, tokens)[0].backward()  # scratch and tables are there
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            loss = model.loss(tokens, tokens)[0]
            loss.backward()
            measured = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert loss.data.size == 1
        predicted = memory_of.memory(job, Layout()).activations
        assert predicted == pytest.approx(measured, rel=0.05), family


# -- communication -------------------------------------------------------------------------------


def test_collectives_cost_what_their_schedules_cost() -> None:
    links = Links(FAST, 64, nodes=64)
    schedule = make("all_reduce", "ring", 64)
    expected = simulate(schedule, 2**24, FAST.network((64,)))
    cost = links.cost("all_reduce", 2**24, 64)
    assert cost == (expected.makespan, expected.bytes_sent_max)
    ring = published.ring_all_reduce(2**24, 64, 1 / FAST.beta_intra, FAST.alpha_intra)
    adding = 63 / 64 * 2**24 * FAST.gamma
    assert cost.seconds == pytest.approx(ring + adding, rel=1e-6)


def test_groups_lie_on_nodes_as_the_mesh_puts_them() -> None:
    links = Links(FAST, 16, nodes=4)
    assert links.layout(4, 1) == (4,)
    assert links.layout(4, 2) == (2, 2)
    assert links.layout(4, 4) == (1, 1, 1, 1)
    assert links.message(1000, 4).seconds == FAST.alpha + 1000 * FAST.beta
    shared = Links(FAST, 16, nodes=4, shared=True)
    assert shared.message(1000, 4).seconds == FAST.alpha + 4000 * FAST.beta


def test_tensor_parallel_traffic() -> None:
    links, job = Links(FAST, 4), Job(replace(TINY, dim=256, seq=256), 16)
    layout = Layout(tp=4, microbatches=4)
    tokens = layout.tokens(job) * 256 * 4
    forward, backward = communication.stage_traffic(job, layout, links, 3, False, False).tp
    one = links.cost("all_reduce", tokens, 4)
    assert forward == backward == one.times(6)
    assert one.sent == pytest.approx(tokens * 2 * 3 / 4)
    cut = replace(layout, sequence_parallel=True)
    forward, _ = communication.stage_traffic(job, cut, links, 3, False, False).tp
    assert forward.sent == pytest.approx(one.times(6).sent)  # two steps of an all_reduce


def test_many_ranks() -> None:
    job = Job(named("llama3-405b"), batch=16384)
    links = Links(Machine(flops=4e14, attention_flops=2e14, memory_bandwidth=2e12), 2**17)
    layout = Layout(pp=16, dp=1024, tp=8, fsdp=1, microbatches=16)
    found = search.predict(job, layout, links)
    assert found.axes["dp"].seconds > 0


# -- time and search -----------------------------------------------------------------------------


def test_a_pipelines_bubble_is_the_schedules() -> None:
    job = Job(replace(TINY, vocab=1), 16)
    links = Links(Machine(overhead=0.0, memory_bandwidth=1e30, alpha_intra=0.0, beta_intra=0.0), 4)
    found = search.predict(job, Layout(pp=4, microbatches=16), links)
    assert found.bubble == pytest.approx(published.bubble("1f1b", 4, 16), abs=0.01)
    drafted = search.draft(job, Layout(pp=4, microbatches=16), links)
    assert drafted.bound() <= found.step * (1 + 1e-9)


def test_the_search_finds_what_trying_all_finds() -> None:
    links = Links(FAST, 8)
    limit = memory_of.memory(JOB, Layout(dp=8)).total
    best: dict[tuple[int, ...], float] = {}
    for layout in layouts(JOB, 8):
        if memory_of.memory(JOB, layout).total <= limit:
            plan = search.predict(JOB, layout, links)
            mesh = layout.pp, layout.dp, layout.cp, layout.tp
            best[mesh] = min(best.get(mesh, plan.step), plan.step)
            assert search.draft(JOB, layout, links).bound() <= plan.step * (1 + 1e-9)
    found = search.search(JOB, links, limit, most=5)
    assert [plan.step for plan in found] == sorted(best.values())[:5]
    assert all(plan.memory.total <= limit for plan in found)


def test_nothing_fits() -> None:
    job = Job(named("llama-70b"), 8)
    with pytest.raises(ConfigError, match=r"memory='1 GB': no layout fits; the nearest, .* more"):
        search.search(job, Links(FAST, 8), 1e9)


def test_recomputation_runs_forward_once_more() -> None:
    plain = compute.stages(JOB, Layout(), FAST)[0]
    again = compute.stages(JOB, Layout(recompute=True), FAST)[0]
    assert again.forward == plain.forward
    assert plain.backward < again.backward < plain.backward + plain.forward


def test_ranks_that_share_a_core_take_turns() -> None:
    alone, shared = (Links(Machine(cores=cores), 4, 4) for cores in (4, 2))
    plain, twice = (search.predict(JOB, Layout(dp=4), links) for links in (alone, shared))
    assert twice.step == pytest.approx(2 * plain.step)
    assert twice.mfu == pytest.approx(plain.mfu)
    line = Layout(pp=4, microbatches=4)
    plain, twice = (search.predict(JOB, line, links) for links in (alone, shared))
    assert plain.step < twice.step < 2 * plain.step  # while one waits another runs
    assert search.draft(JOB, line, shared).bound() <= twice.step


def test_flops_per_token_are_those_of_the_model() -> None:
    config = replace(TINY, dim=256, vocab=1024)
    built = models.build(config).flops_per_token(config.seq)
    assert compute.flops_per_token(config) == pytest.approx(built, rel=0.01)  # no biases, norms


# -- machine -------------------------------------------------------------------------------------


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = Machine(flops=1e12, beta=1e-9)
    write(path, machine)
    assert read(path) == machine
    path.write_text('{"speed": 3}')
    with pytest.raises(ConfigError, match="not speed"):
        read(path)
    with pytest.raises(ConfigError, match="flops=0"):
        Machine(flops=0)


# -- the formulas of others ----------------------------------------------------------------------


def test_bytes_a_parameter_with_a_distributed_optimizer() -> None:
    found = [published.distributed_optimizer(d, 1) for d in ("float32", "bfloat16", "float16")]
    assert found == [16, 18, 20]
    assert published.distributed_optimizer("bfloat16", 8) == 6 + 12 / 8
    with pytest.raises(ConfigError, match="dtype"):
        published.distributed_optimizer("int8", 1)


def test_zero_on_eight_gpus() -> None:
    gib, count, largest = 2**30, 2851e6, 32e6  # DeepSpeed's example; theirs are rounded
    assert published.zero(2, count, 8) / gib == pytest.approx(15.93, abs=0.01)
    assert published.zero(3, count, 8, largest) / gib == pytest.approx(6.10, abs=0.01)
    assert published.zero(3, count, 8, largest, "all") / gib == pytest.approx(0.12, abs=0.005)
    assert published.zero(2, count, 8, offload="optimizer") == 2 * count
    assert published.zero(3, count, 8, largest, "optimizer") == 4 * largest + 2 * count / 8
    with pytest.raises(ConfigError, match="stage"):
        published.zero(1, count, 8)


def test_activations_of_megatron() -> None:
    assert published.megatron_activations(2048, 4, 12288) == 2048 * 4 * 12288 * 34
    cut = published.megatron_activations(2048, 4, 12288, 8, sequence_parallel=True)
    assert cut == 2048 * 4 * 12288 * 34 / 8
    assert published.megatron_activations(2048, 4, 12288, 8) == 2048 * 4 * 12288 * 13
    assert published.interleaving_factor(8, 2) == 1 + 7 / 16


@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1)]
)
def test_bubbles_are_those_that_are_simulated(name: str, v: int) -> None:
    schedule = pipeline.make(name, 4, 8, v if name == "interleaved" else None)
    found = pipeline.simulate(schedule, 1 / v, 1 / v, 1 / v).bubble
    assert found == pytest.approx(published.bubble(name, 4, 8, v))


# -- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    flags = ["--ranks", "4", "--memory", "1GB", "--top", "3", "--json", str(path)]
    assert main(["plan", *flags]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3
    assert rows[0]["step"] <= rows[1]["step"]
    assert rows[0]["memory"]["total"] <= 1e9
    assert set(rows[0]["communication"]) == {"pp", "dp", "cp", "tp"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "1MB"], "no layout fits; the nearest"),
        (["--model", "gpt5"], "llama-7b"),
        (["--dim", "100", "--heads", "3"], "heads must divide dim=100"),
        (["--tp", "3"], "Pass --tp with one of 1, 2, 4"),
        (["--memory", "much"], "a number of bytes"),
        (["--flops", "-1"], "flops=-1"),
        (["--ranks", "0"], "ranks=0"),
        (["--ranks", "1000000000"], "ranks=1000000000"),
        (["--cores", "0"], "cores=0"),
        (["--nodes", "3,3"], "nodes"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_module, "_many_ranks", lambda: False)  # also under mpiexec
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("mpipar: error: ")
