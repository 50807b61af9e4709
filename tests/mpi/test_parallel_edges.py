"""Arguments that parallel layers, meshes and losses must refuse, on every rank and by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.autograd import Tensor
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError
from mpipar.parallel.clip import clip_grad_norm
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.replicated import gather_from, scatter_to
from mpipar.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpipar.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), ("4", 4), (4, 4.0), (4, True)])
def test_sizes_are_positive_integers(comm: Communicator, kind: Any, sizes: Any) -> None:
    with pytest.raises(ConfigError, match="integer"):
        kind(*sizes, comm)


@pytest.mark.parametrize("std", [-1.0, float("nan"), "wide"])
def test_deviations_are_finite(comm: Communicator, std: Any) -> None:
    with pytest.raises(ConfigError, match="std"):
        ColumnParallelLinear(4, 12, comm, std=std)


def test_dense_parameters_have_their_dimensions(comm: Communicator) -> None:
    for make in (ColumnParallelLinear.from_full, RowParallelLinear.from_full):
        with pytest.raises(BufferMismatchError, match="weight"):
            make(np.ones(4), None, comm)
        with pytest.raises(BufferMismatchError, match="bias"):
            make(np.ones((12, 12)), [0.0] * 12, comm)  # type: ignore[arg-type]
    with pytest.raises(BufferMismatchError, match="weight"):
        VocabParallelEmbedding.from_full(np.ones(4), comm)


@pytest.mark.parametrize("size", [2**70, -1, True, "2", 1.0])
def test_a_mesh_has_whole_sizes(raw: MPI.Intracomm, size: Any) -> None:
    with pytest.raises(ConfigError):
        Mesh(raw, tp=size)


LOSSES: list[tuple[Any, Any]] = [(None, 1), (np.ones(2), 1), ("one", 1), (1, 1), (1.0, 1.5)]


@pytest.mark.parametrize(("loss", "count"), LOSSES)
def test_a_loss_is_one_number(comm: Communicator, loss: Any, count: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss_sum|count"):
        token_mean(loss, count, comm)


def test_clipping_takes_a_mesh_and_a_number(comm: Communicator) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        clip_grad_norm([Tensor([1.0], requires_grad=True)], 1.0, comm)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_norm"):
        clip_grad_norm([Tensor([1.0], requires_grad=True)], "1")  # type: ignore[arg-type]


CUTS = [scatter_to, gather_from, partial(Communicator.slice, scale_grad=False)]


@pytest.mark.parametrize("cut", CUTS)
def test_blocks_are_of_numbers_along_a_dimension(comm: Communicator, cut: Callable) -> None:
    for dim in (99, -3, "0"):
        with pytest.raises(ConfigError, match="dim"):
            cut(comm, np.ones((4, 4)), dim)
    for x in (np.array([None, None]), np.array(["a", "b"]), [1.0, 2.0]):
        with pytest.raises(DtypeMismatchError, match="numbers"):
            cut(comm, x, 0)


def test_logits_are_floating_point(comm: Communicator) -> None:
    with pytest.raises(DtypeMismatchError, match="floating-point"):
        vocab_parallel_cross_entropy(np.ones((2, 3), int), [0, 1], comm)  # type: ignore[arg-type]
