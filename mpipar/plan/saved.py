"""What the tape keeps of each operation between forward and backward: the one table of it.

A row names an array that some operation keeps (the operation, what it keeps, where that lies) and
its elements for each token.  An array that two operations keep stands once: the input of a linear
layer is the output of the norm before it.  Change a row when an operation changes what it keeps.

What lies BETWEEN the column and row layers of tensor parallelism is whole on every rank, or cut
over tp with sequence parallelism; what lies INSIDE them is always cut over tp.  Sources:
autograd/fused.py, linear.py, attention.py, loss.py; parallel/tensor/, context/.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as as_dtype
from mpipar.models.config import ModelConfig
from mpipar.plan.layout import Layout

BETWEEN, INSIDE = "between", "inside"
ACTIVATION, COMPUTED, DOUBLE, BYTE = "activation", "computed", "double", "byte"


class Kept(NamedTuple):
    """An array that is kept: its name, elements a token, where it lies, and of which dtype.

    dtype: that of activations, that of sums (float32 for 16 bits), float64, or a byte.
    """

    name: str
    elements: float
    place: str = INSIDE
    dtype: str = ACTIVATION


def block(config: ModelConfig, layout: Layout) -> Iterator[Kept]:
    """Yield what one block keeps."""
    d, kv, hidden = config.dim, config.kv_heads * config.head_dim, config.hidden
    gpt2 = config.model == "gpt2"
    statistics = 2 if gpt2 else 1  # mean and deviation of layer norm; of RMS norm the one
    for norm in ("norm1", "norm2"):
        yield Kept(f"{norm}: its input, the residual stream", d, BETWEEN)
        yield Kept(f"{norm}: statistics of rows", statistics, BETWEEN, COMPUTED)
    yield Kept("qkv: its input", d, BETWEEN)
    yield Kept("attention: q, k and v, views of qkv's output", d + 2 * kv)
    traded = layout.cp > 1 and layout.cp_layout == "ulysses"  # q, k and v are copies then
    if not gpt2 and not traded:
        yield Kept("attention: q and k turned by rotary", d + kv)
    yield Kept("attention, projection: output", d)
    yield Kept("attention: log-sum-exp of rows", config.heads, INSIDE, DOUBLE)
    if traded:
        yield Kept("attention: its output before it is traded back", d)
    yield Kept("up: its input", d, BETWEEN)
    if gpt2:
        yield Kept("gelu: its input", hidden)
    else:
        yield Kept("swiglu: gate and up, views of gate_up's output", 2 * hidden)
    yield Kept("down: its input", hidden)
    if config.dropout:
        yield Kept("dropout1, dropout2: what is kept", 2 * d, BETWEEN, BYTE)


def recomputed(config: ModelConfig) -> Iterator[Kept]:
    """Yield what a block keeps that is run again in backward."""
    yield Kept("block: its input", config.dim, BETWEEN)


def in_backward(config: ModelConfig) -> Iterator[Kept]:
    """Yield the gradients that are there beside what is kept, where a block needs most of them."""
    if config.model == "gpt2":
        yield Kept("down: gradient of its input", config.hidden)
    else:
        yield Kept("swiglu: gradients of gate and up, in gate_up's output each", 4 * config.hidden)
    yield Kept("residual stream: its gradient", config.dim, BETWEEN)


def first(config: ModelConfig) -> Iterator[Kept]:
    """Yield what the embeddings keep."""
    yield Kept("embedding: ids", 1, BETWEEN, DOUBLE)
    if config.dropout:
        yield Kept("dropout: what is kept", config.dim, BETWEEN, BYTE)


def last(config: ModelConfig, layout: Layout) -> Iterator[Kept]:
    """Yield what the last norm, the output layer and the loss keep."""
    yield Kept("norm: its input", config.dim, BETWEEN)
    yield Kept("norm: statistics of rows", 2, BETWEEN, COMPUTED)
    yield Kept("logits: their input", config.dim, BETWEEN)
    if layout.tp == 1:
        yield Kept("cross_entropy: logits and their slope", 2 * config.vocab)
    else:
        yield Kept("vocab_parallel_cross_entropy: exponentials", config.vocab, INSIDE, COMPUTED)
        yield Kept("logits, until the loss is there", config.vocab)
        yield Kept("vocab_parallel_cross_entropy: sums and scales", 4, BETWEEN, DOUBLE)


def token_bytes(kept: Iterable[Kept], config: ModelConfig, layout: Layout) -> float:
    """Return the bytes that a rank keeps for each token that its micro-batch has."""
    stored = as_dtype(config.dtype)
    widths = {
        ACTIVATION: stored.itemsize,
        COMPUTED: compute_dtype(stored).itemsize,
        DOUBLE: 8,
        BYTE: 1,
    }
    between = layout.tp if layout.sequence_parallel else 1
    cut = {BETWEEN: between, INSIDE: layout.tp}
    return sum(one.elements * widths[one.dtype] / cut[one.place] for one in kept)
