"""Weights of Hugging Face folders on all ranks: the logits are those that transformers computed."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar import models, partition
from mpipar.errors import CheckpointError, ConfigError
from mpipar.huggingface.convert import from_checkpoint, to_checkpoint
from mpipar.huggingface.initial import load_weights, model_of
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train

GOLDEN = Path(__file__).resolve().parents[1] / "golden"  # made by transformers 5.24
KINDS = ("gpt2", "llama")


@pytest.fixture
def tokens() -> np.ndarray:
    return np.load(GOLDEN / "tokens.npy").astype(np.int64)  # (2, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_over_tensor_parallel_ranks(
    kind: str, world: MPI.Intracomm, tokens: np.ndarray
) -> None:
    if world.size == 3:
        pytest.skip("3 ranks do not divide the heads")
    with mp.Mesh(world, tp=world.size) as mesh, mp.no_grad():
        model = models.build(model_of(GOLDEN / kind), **mp.factories(mesh))
        load_weights(GOLDEN / kind, model, mesh)
        logits = mesh.tp.all_gather(model(tokens).data, sizes="exchange")
        np.testing.assert_allclose(logits, np.load(GOLDEN / kind / "logits.npy"), atol=1e-4)
        sizes = partition.blocks(model.config.vocab, world.size)
        written = {
            cached: models.generate(
                model, tokens[0], 30, cached=cached,
                gather=lambda x: mesh.tp.all_gather(x, sizes=sizes),
            )
            for cached in (False, True)
        }  # fmt: skip
        np.testing.assert_array_equal(written[True], written[False])


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_the_same_weights(kind: str, world: MPI.Intracomm) -> None:
    """FSDP's flat pieces, which cut through rows of several tensors."""
    with mp.Communicator(world) as comm:
        model = models.build(model_of(GOLDEN / kind))
        load_weights(GOLDEN / kind, model, comm)
        whole = model.state_dict()
        sharded = mp.FSDP(models.build(model_of(GOLDEN / kind)), comm, mp.FsdpConfig())
        load_weights(GOLDEN / kind, sharded, comm)
        for name, array in sharded.full_state_dict().items():
            np.testing.assert_array_equal(array, whole[name], err_msg=name)
        sharded.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_to_a_checkpoint_and_back(kind: str, world: MPI.Intracomm, shared_path: Path) -> None:
    """All ranks save; one writes the folder again, and its tensors are the first one's bits."""
    with mp.Communicator(world) as comm:
        saved = to_checkpoint(GOLDEN / kind, shared_path / "saved", comm)
    with mp.Communicator(MPI.COMM_SELF) as alone:
        if world.rank == 0:
            back = from_checkpoint(saved, shared_path / "back", alone, 20_000)
    world.barrier()
    back = shared_path / "back"
    assert model_of(back) == model_of(GOLDEN / kind)
    assert (back / "model.safetensors.index.json").exists()
    with mp.Communicator(world) as comm:
        states = []
        for folder in (GOLDEN / kind, back, saved):
            model = models.build(model_of(folder))
            load_weights(folder, model, comm)
            states.append(model.state_dict())
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array, err_msg=name)
        np.testing.assert_array_equal(states[2][name], array, err_msg=name)


def test_training_begins_with_them(world: MPI.Intracomm, shared_path: Path) -> None:
    data = shared_path / "tokens.npy"
    if world.rank == 0:
        np.save(data, np.random.default_rng(0).integers(0, 61, 2000).astype(np.uint16))
    world.barrier()
    how = {"data": str(data), "seq": 12, "batch": 6, "steps": 2, "sample": 0, "dtype": "float64"}
    config = TrainConfig(init=str(GOLDEN / "gpt2"), fsdp="3", **how)
    alone = train(TrainConfig(init=str(GOLDEN / "gpt2"), **how), MPI.COMM_SELF)
    spread = train(config, world)
    for one, other in zip(alone, spread, strict=True):
        for key in {"loss", "val_loss", "grad_norm"} & set(one):
            assert other[key] == pytest.approx(one[key], rel=1e-10)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layers": 3}, "layers=3: the weights of .* are of a model with 2"),
        ({"seq": 25}, "seq=25: the model of .* knows 24 positions"),
        ({"init": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_settings_that_do_not_fit(
    flags: dict[str, object], words: str, world: MPI.Intracomm
) -> None:
    config = TrainConfig(**{"init": str(GOLDEN / "gpt2"), "seq": 12, **flags})
    with pytest.raises((CheckpointError, ConfigError), match=words):
        train(config, world)
