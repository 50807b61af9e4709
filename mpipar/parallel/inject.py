"""The layers that a model receives so that it runs in parallel: models know nothing of meshes.

model = models.build(config, **factories(mesh))

role "column"   ColumnParallelLinear over mesh.tp    queries, keys, values; MLP up
role "row"      RowParallelLinear over mesh.tp       attention output; MLP down
role "dense"    nn.Linear, replicated
embedding       VocabParallelEmbedding, whose `logits` are spread over the vocabulary
cross_entropy   vocab_parallel_cross_entropy of such logits
"""

from collections.abc import Callable, Sequence
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd import functional
from mpipar.errors import ConfigError, explain
from mpipar.nn.linear import Linear
from mpipar.nn.module import Module
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from mpipar.parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


def factories(mesh: Mesh) -> dict[str, Callable[..., Any]]:
    """Return the arguments linear, embedding, attention and cross_entropy of `models.build`.

    Input and output of every layer but "column" and `logits` are replicated over mesh.tp; attention
    runs on the heads of this rank without communication.
    """

    def linear(
        role: str,
        in_features: int,
        out_features: int,
        *,
        parts: Sequence[int] | None = None,
        **settings: Any,
    ) -> Module:
        if role == "column":
            return ColumnParallelLinear(in_features, out_features, mesh.tp, parts=parts, **settings)
        if role == "row":
            return RowParallelLinear(in_features, out_features, mesh.tp, parts=parts, **settings)
        if role == "dense":
            return Linear(in_features, out_features, **settings)
        rule = 'it must be "column", "row" or "dense"'
        raise ConfigError(explain("role", role, rule, "Choose one of them"))

    def embedding(num: int, dim: int, **settings: Any) -> Module:
        return VocabParallelEmbedding(num, dim, mesh.tp, **settings)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return functional.attention(q, k, v, causal=True)

    def cross_entropy(logits: Any, targets: Array, reduction: str = "mean", **settings: Any) -> Any:
        return vocab_parallel_cross_entropy(
            logits, targets, mesh.tp, reduction=reduction, **settings
        )

    return {
        "linear": linear,
        "embedding": embedding,
        "attention": attention,
        "cross_entropy": cross_entropy,
    }
