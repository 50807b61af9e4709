"""The layers that a model receives so that it runs in parallel: models know nothing of meshes.

model = models.build(config, **factories(mesh))

role "column"   ColumnParallelLinear over mesh.tp    queries, keys, values; MLP up
role "row"      RowParallelLinear over mesh.tp       attention output; MLP down
role "dense"    nn.Linear, replicated
embedding       VocabParallelEmbedding, whose `logits` are spread over the vocabulary
cross_entropy   vocab_parallel_cross_entropy of such logits
experts         ExpertBlock over mesh.ep, of all tokens of mesh.dp and mesh.cp, cut over mesh.tp
norm, shard, length   with sequence parallelism, for blocks of the sequence between the layers
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd import functional
from mpipar.errors import ConfigError, explain
from mpipar.nn.linear import Linear
from mpipar.nn.module import Module
from mpipar.nn.norm import LayerNorm, RMSNorm
from mpipar.parallel.experts.block import ExpertBlock
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpipar.parallel.tensor.sequence import SequenceLayerNorm, SequenceRMSNorm, SequenceShards
from mpipar.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


def factories(
    mesh: Mesh,
    sequence_parallel: bool = False,
    overlap: bool = False,
    attention: Callable[..., Any] | None = None,
    capacity_factor: float | None = None,
) -> dict[str, Callable[..., Any]]:
    """Return the arguments of `models.build` for a model that runs on the ranks of `mesh`.

    sequence_parallel: what lies between column and row layers is this rank's block of the sequence
    over mesh.tp; else it is replicated there.  Logits are of the whole sequence in either case.
    overlap: collectives over mesh.tp travel beside the products before or after them.
    attention: (q, k, v) of this rank's heads -> the same shape; None is causal attention over the
    sequence that the model is given, without communication.
    capacity_factor: that of MoE, while training.

    Raises ConfigError if a sequence is spread over mesh.cp and no attention is given that knows.
    """
    if attention is None and mesh.cp.size > 1:
        rule = "with context-parallel ranks it must be one that reaches over mesh.cp"
        raise ConfigError(explain("attention", attention, rule, "Pass one"))
    shards = SequenceShards(mesh.tp) if sequence_parallel and mesh.tp.size > 1 else None
    cut: dict[str, Any] = {"sequence": shards, "overlap": overlap}

    def linear(
        role: str,
        in_features: int,
        out_features: int,
        *,
        parts: Sequence[int] | None = None,
        **settings: Any,
    ) -> Module:
        if role == "dense":
            return Linear(in_features, out_features, **settings)
        settings = {**cut, "parts": parts, **settings}
        if role == "column":
            return ColumnParallelLinear(in_features, out_features, mesh.tp, **settings)
        if role == "row":
            return RowParallelLinear(in_features, out_features, mesh.tp, **settings)
        rule = 'it must be "column", "row" or "dense"'
        raise ConfigError(explain("role", role, rule, "Choose one of them"))

    def embedding(num: int, dim: int, **settings: Any) -> Module:
        return VocabParallelEmbedding(num, dim, mesh.tp, **cut, **settings)

    def causal(q: Any, k: Any, v: Any) -> Any:
        return functional.attention(q, k, v, causal=True)

    def cross_entropy(logits: Any, targets: Array, reduction: str = "mean", **settings: Any) -> Any:
        return vocab_parallel_cross_entropy(
            logits, targets, mesh.tp, reduction=reduction, **settings
        )

    def experts(*sizes: int, **settings: Any) -> Module:
        settings |= {"over": mesh.group("dp", "cp"), "capacity_factor": capacity_factor}
        settings |= {"tp": mesh.tp if mesh.tp.size > 1 else None, "sequence": shards}
        return ExpertBlock(*sizes, mesh.ep, **settings)

    made: dict[str, Callable[..., Any]] = {
        "linear": linear,
        "embedding": embedding,
        "attention": attention or causal,
        "cross_entropy": cross_entropy,
        "experts": experts,
    }
    return made if shards is None else {**made, **_between(shards)}


def _between(shards: SequenceShards) -> dict[str, Callable[..., Any]]:
    """Return the functions for what works on blocks of the sequence between the layers."""
    kinds: dict[type, type] = {LayerNorm: SequenceLayerNorm, RMSNorm: SequenceRMSNorm}

    def norm(kind: type[Module], dim: int, **settings: Any) -> Module:
        made: Module = kinds[kind](shards.comm, dim, **settings)
        return made

    return {"norm": norm, "shard": shards.shard, "length": shards.whole_length}
