"""What both model families share: the way from tokens to logits, the loss, and the cost.

    tokens (B, S) --embed--> (B, S, C) --blocks--> (B, S, C) --logits--> (B, S, V)

`embed`, each of `blocks`, and `logits` are the places where a pipeline may cut.
Invariants: activations between blocks are whole on every rank of a tensor-parallel group, or this
rank's part of the sequence where the layers are made so (`shard`); positions and logits are those
of the whole sequence.  The loss is a SUM over this rank's tokens, so that sums over ranks and
micro-batches are exact.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.autograd import Tensor, recompute
from mpipar.autograd.record import array
from mpipar.errors import BufferMismatchError, explain
from mpipar.models.config import ModelConfig
from mpipar.models.factories import Factories
from mpipar.nn.dropout import Dropout
from mpipar.nn.embedding import check_ids
from mpipar.nn.module import Module
from mpipar.nn.norm import LayerNorm, RMSNorm

Norm = LayerNorm | RMSNorm
IGNORE = -100  # a target that does not count


@dataclass(frozen=True)
class Part:
    """What a stage of a pipeline holds of a model: see `stages`."""

    layers: range
    first: bool  # embeddings
    last: bool  # the last norm, and the output layer


class Block(Module):
    """Attention and feed-forward layer, each behind a norm and added to the residual stream.

    recompute: whether only its input is kept for backward, which runs the block again.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        make: Factories,
        norm: type[Norm],
        attention: Module,
        mlp: Module | None,
    ) -> None:
        """Take the two halves, built under the global name `name`; mlp None: experts."""
        self.shard, self.recompute = make.shard, make.recompute
        self.has_experts = mlp is None
        self.norm1 = make.normal(config, norm, f"{name}.norm1")
        self.attention = attention
        self.dropout1 = Dropout(config.dropout, seed=config.seed, name=f"{name}.dropout1")
        self.norm2 = make.normal(config, norm, f"{name}.norm2")
        self.mlp = make.mixture(config, f"{name}.mlp") if mlp is None else mlp
        self.dropout2 = Dropout(config.dropout, seed=config.seed, name=f"{name}.dropout2")

    def forward(self, x: Tensor, positions: Array) -> Tensor:
        """Map x (B, S, C) at global positions (S,) or (B, S) to (B, S, C).

        Where x is a part of the sequence, so is the result; positions are those of the whole.
        """
        if self.recompute:
            again: Tensor = recompute(self._halves, x, positions)
            return again
        return self._halves(x, positions)

    def _halves(self, x: Tensor, positions: Array) -> Tensor:
        here = self.shard(positions)  # of the tokens in x
        x = x + self.dropout1(self.attention(self.norm1(x), positions), here)
        inputs = (self.norm2(x), positions) if self.has_experts else (self.norm2(x),)
        return x + self.dropout2(self.mlp(*inputs), here)


class Transformer(Module):
    """Base of the model families: a subclass says what a block and a norm are.

    positions: the global positions (S,) of the tokens, where they are not 0..S-1 and `forward` is
    not told.
    """

    token_embedding: Any
    head: Any
    positions: Array | None = None
    names_of_whole = True  # the names of a part's parameters are those in the whole model

    def __init__(
        self, config: ModelConfig, make: Factories, norm: type[Norm], part: Part | None = None
    ) -> None:
        """Build all layers, or those of a part of the model."""
        self.config = config
        self.part = part or Part(range(config.layers), first=True, last=True)
        self.cross_entropy = make.cross_entropy
        self.shard, self.length = make.shard, make.length
        ends = self.part.first, self.part.last
        needs_table = self.part.first or (self.part.last and config.tied)
        self.token_embedding = make.table(config, "token_embedding") if needs_table else None
        self.dropout = Dropout(config.dropout, seed=config.seed, name="dropout")
        made = {index: self.block(make, f"blocks.{index}") for index in self.part.layers}
        self.blocks: Any = list(made.values()) if all(ends) else made  # by number in a part
        self.norm: Any = None
        self.head = None
        if self.part.last:
            self.norm = make.normal(config, norm, "norm")
            self.head = None if config.tied else make.table(config, "head")

    def block(self, make: Factories, name: str) -> Block:
        """Build the block of the global name `name`; a subclass defines it."""
        raise NotImplementedError

    def forward(self, tokens: Any, positions: Array | None = None) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), integers.

        A part of the model takes and returns activations (B, S, C) where it is not first or last.
        positions: global positions (S,) or (B, S) of the tokens, where they are not 0..S-1.
        Raises ConfigError for a token outside the vocabulary, and BufferMismatchError for tokens or
        positions of another shape.
        """
        positions = self.positions if positions is None else positions
        x = tokens
        if self.part.first:
            tokens, positions = _checked(tokens, positions)
            x = self.embed(tokens, positions)
        elif positions is None:
            positions = np.arange(self.length(x))
        for block in self.blocks.values() if isinstance(self.blocks, dict) else self.blocks:
            x = block(x, positions)
        return self.logits(x) if self.part.last else x

    def embed(self, tokens: Array, positions: Array) -> Tensor:
        """Return the first activations (B, S, C), or this rank's part of the sequence."""
        check_ids("tokens", tokens, self.config.vocab)
        return self.dropout(self.lookup(tokens, positions), self.shard(positions))

    def lookup(self, tokens: Array, positions: Array) -> Tensor:
        """Return the rows of the tables for each token (B, S, C), or for this rank's part."""
        return self.token_embedding(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, V) of the last activations, or this rank's part of V."""
        table = self.token_embedding if self.head is None else self.head
        return table.logits(self.norm(x))

    def loss(
        self, tokens: Array, targets: Array, positions: Array | None = None
    ) -> tuple[Tensor, int]:
        """Return (sum of the losses, number of targets that count); the rest are -100.

        Raises ConfigError for a token or target outside the vocabulary.
        """
        check_ids("targets", array(targets), self.config.vocab, IGNORE)
        return self.loss_of(self(tokens, positions), targets)

    def loss_of(self, logits: Tensor, targets: Array) -> tuple[Tensor, int]:
        """Return `loss` from the logits, for targets that are known to be in the vocabulary."""
        targets = array(targets)
        total = self.cross_entropy(logits, targets, reduction="sum")
        return total, int((targets != IGNORE).sum())

    def flops_per_token(self, seq: int) -> float:
        """Return the arithmetic of forward and backward for one token: 6 N + 6 L s d.

        N counts global parameters that multiply every token: position and token embeddings are
        only looked up, except for a tied one, which is also the output layer.  Of experts those
        count that a token uses, and parts of a model have their share.  A causal mask halves the
        attention: L layers * 2 products * s/2 keys * 2 d, three times (backward twice).
        """
        looked_up = {"position_embedding.weight"}
        if not (self.config.tied and self.part.last):
            looked_up.add("token_embedding.weight")
        weights = sum(
            prod(parameter.spec.shape) * _use(parameter.spec.shape, self.config)
            for parameter in self.parameters()
            if parameter.spec.name not in looked_up
        )
        return 6.0 * weights + 6.0 * len(self.blocks) * seq * self.config.dim


def _use(shape: tuple[int, ...], config: ModelConfig) -> float:
    """Return the share of a weight that a token meets; those of experts have three dimensions."""
    return config.top_k / config.experts if len(shape) == 3 else 1.0


def _checked(tokens: Any, positions: Any) -> tuple[Array, Array]:
    """Return tokens (B, S) and positions (S,) or (B, S) as arrays, 0..S-1 if None.

    Raises BufferMismatchError for other shapes, and for positions that are not integers >= 0.
    """
    tokens = array(tokens)
    if tokens.ndim != 2 or not tokens.size:
        rule = "tokens must be (batch, sequence), neither of them empty"
        fix = "Pass tokens[None] for one sequence" if tokens.ndim == 1 else "Reshape them"
        raise BufferMismatchError(explain("tokens.shape", tokens.shape, rule, fix))
    if positions is None:
        return tokens, np.arange(tokens.shape[1])
    positions = array(positions)
    if positions.shape not in (tokens.shape[1:], tokens.shape):
        rule = f"positions must be (sequence,) or (batch, sequence) of tokens {tokens.shape}"
        raise BufferMismatchError(
            explain("positions.shape", positions.shape, rule, "Give each token its position")
        )
    if positions.dtype.kind not in "iu" or positions.min() < 0:
        rule = "positions must be integers from 0"
        given = (positions.dtype.name, positions.min().item())
        raise BufferMismatchError(explain("positions (dtype, least)", given, rule, "Convert them"))
    return tokens, positions
