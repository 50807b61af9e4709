"""What a rank holds of the model, and how gradients get to it: whole, or in stages of a pipeline.

    Whole      one module                       wrapped by DataParallel or FSDP over dp x cp
    Staged     stages of a pipeline over pp     each wrapped likewise

Both have the same methods, so a step is the same for every mesh.  The gradient of the mean loss of
the global batch is a sum: over the tokens of a micro-batch, micro-batches, and the ranks of dp and
cp; `total`, the number of valid tokens of the whole batch, divides once (`token_share`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from mpipar import models, rng
from mpipar.autograd import Tensor, functional, no_grad
from mpipar.models.transformer import IGNORE
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.context.attend import attention_over
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.experts.block import ExpertBlock
from mpipar.parallel.experts.moe import expert_parameters
from mpipar.parallel.fsdp import FSDP, FsdpConfig
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_share
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.pipeline import Pipeline
from mpipar.trace.record import phase
from mpipar.train.config import TrainConfig
from mpipar.train.data import Rows

STRATEGIES = {"1": "SHARD_OPTIMIZER", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}  # ZeRO's stages


class Attention:
    """Causal attention of a model: over the ranks of mesh.cp, or over what this rank has alone."""

    def __init__(self, over_ranks: Callable[[Any, Any, Any], Any]) -> None:
        """Take the function for a sequence that is spread over ranks."""
        self.over_ranks, self.alone = over_ranks, False

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Map q, k, v [B, S, heads, D] to [B, S, heads, D]."""
        if self.alone:
            return functional.attention(q, k, v, causal=True)
        return self.over_ranks(q, k, v)


class Held:
    """A model on a mesh, as the training loop sees it; Whole and Staged say how.

    data: the ranks that hold the same part of the model, those of dp and cp.  same_experts: those
    of them with the same experts, if these are spread.  parts: the modules here.  saved:
    what names all parameters that are here.
    flops_per_token, count: arithmetic and parameters of the whole model.
    """

    parts: list[Any]
    saved: Any
    flops_per_token: float
    count: int

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        """Collective: build this rank's part of the model."""
        self.config, self.fsdp = config.model_config(), config.fsdp
        self.data: Communicator = mesh.group("dp", "cp")
        self.attention = Attention(attention_over(mesh, config.layout))
        self.shared = False if config.elastic else None  # no window outlives one of its ranks
        self.balance = config.balance_weight
        self.same_experts = mesh.group("edp") if config.ep > 1 else None
        how: dict[str, Any] = {"capacity_factor": config.capacity_factor}
        how |= {"sequence_parallel": config.sequence_parallel, "overlap": config.overlap}
        made: dict[str, Any] = factories(mesh, attention=self.attention, **how)
        self.make = {**made, "recompute": config.recompute}

    def wrapped(self, module: Any) -> DataParallel | FSDP:
        """Collective over `data`: let the gradients of a module be summed over its ranks."""
        if self.fsdp == "none":
            return DataParallel(module, self.data, op="sum", shared=self.shared)
        blocks = list(module.blocks.values() if isinstance(module.blocks, dict) else module.blocks)
        return FSDP(module, self.data, FsdpConfig(STRATEGIES[self.fsdp]), blocks, op="sum")

    def parameters(self) -> list[Any]:
        """Return the parameters that this rank's optimiser updates: its own, or shards of them."""
        raise NotImplementedError

    def learn(self, rows: Rows, step: int, total: int, last: bool) -> float:
        """Add the gradients of a micro-batch; return this rank's term of the mean loss.

        After the `last` of a step they are those of the global batch.
        """
        raise NotImplementedError

    def loss(self, rows: Rows) -> float:
        """Return the sum of the losses of this rank's tokens, without gradients."""
        raise NotImplementedError

    def __call__(self, tokens: np.ndarray) -> Tensor:
        """Return the logits (1, S, V local) of one whole sequence (1, S), inside `alone`."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Collective: free what gradients and activations travel through."""
        raise NotImplementedError

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Attend without the other ranks of mesh.cp."""
        self.attention.alone = True
        try:
            yield
        finally:
            self.attention.alone = False

    def weigh(self, total: int) -> None:
        """Tell the experts what their balance loss counts in a step of so many tokens."""
        for part in self.parts:
            for layer in part.modules():
                if isinstance(layer, ExpertBlock):
                    layer.balance_per_token = self.balance / total

    def sum_experts(self) -> None:
        """Collective: add the gradients of experts that are spread, once a step.

        Those of all tokens of mesh.ep are in them already; the others' gradients are summed beside
        backward.
        """
        if self.same_experts is not None:
            spread = [param for part in self.parts for param in expert_parameters(part)]
            sum_gradients(spread, self.same_experts)

    def place(self, positions: np.ndarray) -> None:
        """Tell the modules where the tokens lie in the sequence."""
        for part in self.parts:
            part.positions = positions

    @property
    def training(self) -> bool:
        """Whether dropout acts."""
        return bool(self.parts[0].training)

    def train(self, mode: bool = True) -> None:
        """Let dropout act, or not."""
        for part in self.parts:
            part.train(mode)

    def eval(self) -> None:
        """Let dropout rest."""
        self.train(False)


class Whole(Held):
    """The whole model, as one module."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        """Collective: build and wrap it."""
        super().__init__(config, mesh)
        model: Any = models.build(self.config, **self.make)
        model.to(config.device)  # drawn on the host, so that weights are the CPU's
        self.parts = [model]
        self.flops_per_token = model.flops_per_token(config.seq)
        self.count = sum(math.prod(param.spec.shape) for param in model.parameters())
        self.replica = self.saved = self.wrapped(model)

    def parameters(self) -> list[Any]:
        """Return those of the replica."""
        return list(self.replica.parameters())

    def learn(self, rows: Rows, step: int, total: int, last: bool) -> float:
        """Run forward and backward."""
        self.place(rows.positions)
        self.weigh(total)
        sums_up = last or self.fsdp in ("2", "3")  # these keep parts of gradients only
        with rng.at(step, rows.first), nullcontext() if sums_up else self.replica.no_sync():
            with phase("forward"):
                loss_sum, _ = self.replica.loss(rows.inputs, rows.targets)
                term = token_share(loss_sum, total)
            with phase("backward"):
                term.backward()
        if last:
            self.sum_experts()
        return float(term.item())

    @no_grad()
    def loss(self, rows: Rows) -> float:
        """Run forward."""
        self.place(rows.positions)
        return float(self.replica.loss(rows.inputs, rows.targets)[0].item())

    def __call__(self, tokens: np.ndarray) -> Tensor:
        """Run forward."""
        self.place(np.arange(tokens.shape[1]))
        logits: Tensor = self.replica(tokens)
        return logits

    def destroy(self) -> None:
        """Collective: free the communicators of the replica."""
        self.replica.destroy()


class Staged(Held):
    """This rank's stages of a pipeline over mesh.pp."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        """Collective: build and wrap each."""
        super().__init__(config, mesh)
        self.parts = []
        self.microbatches = config.through_pipeline(mesh.dp.size)
        build = models.stages(self.config, config.stages(mesh.dp.size), **self.make)

        def stage(number: int) -> Any:
            self.parts.append(build(number).to(config.device))
            return self.wrapped(self.parts[-1])

        how: dict[str, Any] = {"microbatches": self.microbatches, "chunks": config.chunks}
        self.pipeline = self.saved = Pipeline(stage, mesh.pp, config.order, **how)
        flops = sum(part.flops_per_token(config.seq) for part in self.parts)
        specs = [param.spec for part in self.parts for param in part.parameters()]
        sizes = {spec.name: math.prod(spec.shape) for spec in specs}
        told = mesh.pp.process_group.raw.allgather((flops, sizes))
        self.flops_per_token = sum(each for each, _ in told)
        self.count = sum({k: v for _, own in told for k, v in own.items()}.values())  # tied: once

    def parameters(self) -> list[Any]:
        """Return those of the stages."""
        return self.pipeline.parameters()

    def learn(self, rows: Rows, step: int, total: int, last: bool) -> float:
        """Run all micro-batches of the pipeline; every rank of mesh.pp returns the term."""
        self.place(rows.positions)
        self.weigh(total)
        with rng.at(step, rows.first):
            term = self.pipeline.step(
                rows.inputs, rows.targets, lambda y, t: token_share(self._loss_of(y, t), total)
            )
        self.sum_experts()
        return term

    @no_grad()
    def loss(self, rows: Rows) -> float:
        """Run the forward passes, with rows that do not count where there are too few."""
        self.place(rows.positions)
        missing = max(0, self.microbatches - len(rows.inputs))
        inputs = np.concatenate([rows.inputs, np.repeat(rows.inputs[:1], missing, axis=0)])
        targets = np.pad(rows.targets, ((0, missing), (0, 0)), constant_values=IGNORE)
        return self.pipeline.step(inputs, targets, self._loss_of)

    def __call__(self, tokens: np.ndarray) -> Tensor:
        """Run the forward passes, with the same sequence in every micro-batch."""
        self.place(np.arange(tokens.shape[1]))
        comm = self.pipeline.comm
        out = self.pipeline.forward(np.repeat(tokens, self.microbatches, axis=0))
        last = self.pipeline.schedule.placement[-1]
        form = None if out is None else (out.shape[1:], out.dtype)
        shape, dtype = comm.process_group.raw.bcast(form, last)
        one = np.empty((1, *shape), dtype) if out is None else np.ascontiguousarray(out[:1])
        return Tensor(comm.broadcast(one, src=last))

    def destroy(self) -> None:
        """Collective: free the communicators of the pipeline and of its stages."""
        self.pipeline.destroy()
        for module in self.pipeline.stages.values():
            module.destroy()

    def _loss_of(self, logits: Any, targets: Any) -> Any:
        return self.parts[-1].loss_of(logits, targets)[0]


def hold(config: TrainConfig, mesh: Mesh) -> Held:
    """Collective: build this rank's part of the model."""
    return Whole(config, mesh) if mesh.pp.size == 1 else Staged(config, mesh)
