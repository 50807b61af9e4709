"""Attention over a sequence whose tokens are spread over ranks: by rings, head shards, or both.

A group of p = u * g ranks, u neighbours for Ulysses, g of these for a ring (USP: Fang and Zhao,
2024).  2 x 2, ranks 0..3:

             ring: the same heads, other tokens
    ulysses   0   1      0 and 1 trade their tokens for heads: each has the tokens of both, and half
              2   3      of the heads; then keys and values go round the rings 0-2 and 1-3

ring_attention is u = 1, ulysses_attention g = 1.  Where a rank's tokens lie in the sequence is the
layout's matter (`context_positions`): those of u neighbours together are again those of a rank of
a group of g.  Every rank's q, k and v may have local heads only (tensor parallel).

Before each call the ranks agree on its arguments and tell their numbers of tokens, by one
all_gather of a few numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpipar.autograd import functional
from mpipar.autograd.record import array
from mpipar.autograd.tensor import is_float
from mpipar.comm.agreement import Table, agree
from mpipar.comm.buffers import DTYPES
from mpipar.errors import (
    BufferMismatchError,
    ConfigError,
    DtypeMismatchError,
    MpiparError,
    explain,
)
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.context.groups import neighbours_and_ring
from mpipar.parallel.context.layout import (
    Ranges,
    length_of,
    merged,
    positions_of,
    ranges_of,
    require_layout,
    ulysses_degree,
)
from mpipar.parallel.context.ring import Ring, RingAttention
from mpipar.parallel.context.ulysses import ToHeads, ToTokens, Trade, heads_of
from mpipar.parallel.mesh import Mesh

ORDERS = ("contiguous", "zigzag")
SHOWN: dict[str, Callable[[int], object]] = {
    "dtype": DTYPES.__getitem__,
    "layout": ORDERS.__getitem__,
    "causal": bool,
}  # how a message says them


class Arrangement(NamedTuple):
    """How a call runs: the degrees, and the ranges of positions that each rank holds."""

    ulysses: int
    ring: int
    held: tuple[Ranges, ...]
    heads: int
    kv_heads: int


def ulysses_attention(q: Any, k: Any, v: Any, comm: Communicator, causal: bool = True) -> Any:
    """Return attention over the sequence that `comm` holds in blocks, by trading it for heads.

    Collective.  q [B, S/p, H, D], k and v [B, S/p, G, D]: this rank's of partition.blocks(S, p)
    tokens; H is a multiple of G and at least p.  Returns a Tensor [B, S/p, H, D].

    Raises, on every rank and before the data is sent: ConfigError if there are fewer heads than
    ranks, or H is no multiple of G; BufferMismatchError for shapes that do not belong together,
    or a D of 0; DtypeMismatchError for dtypes that differ or are no floats; MismatchError if the
    ranks differ.
    """
    return context_attention(q, k, v, comm, comm.size, 1, causal, "contiguous")


def ring_attention(
    q: Any, k: Any, v: Any, comm: Communicator, causal: bool = True, layout: str = "zigzag"
) -> Any:
    """Return attention over the sequence that `comm` holds in parts, by a ring of keys and values.

    Collective.  q [B, S/p, H, D], k and v [B, S/p, G, D]: this rank's tokens of S in `layout`:
    "zigzag" (partition.zigzag, its two slices joined) or "contiguous" (partition.blocks).  H is a
    multiple of G.  Returns a Tensor [B, S/p, H, D].  Sums are in float32, or float64 for float64.

    Take your tokens with `context_positions` of the same layout:

        mine = mp.context_positions(S, comm.size, comm.rank)        # layout="zigzag"
        tokens, targets = tokens[:, mine], targets[:, mine]

    The causal mask and rotary turns go by positions: blocks in another order have the right shapes,
    raise nothing, and attend to the wrong tokens.

    Raises, on every rank and before the data is sent, as `ulysses_attention`, and ConfigError for
    an unknown layout.
    """
    return context_attention(q, k, v, comm, 1, comm.size, causal, layout)


def context_attention(
    q: Any,
    k: Any,
    v: Any,
    mesh_or_comm: Mesh | Communicator,
    ulysses: int | None = None,
    ring: int | None = None,
    causal: bool = True,
    layout: str | None = None,
) -> Any:
    """Return attention over a spread sequence, by `ulysses` neighbours and rings of `ring` of them.

    Collective over the communicator, or over mesh.cp.  ulysses * ring is its size; a degree that is
    None is what the other one leaves; both: a ring of all.  layout: that of the tokens over all
    ranks, "contiguous" or "zigzag"; None is zigzag where there is a ring, else contiguous.
    Shapes, result and errors as for `ring_attention`; at least `ulysses` heads are needed.
    """
    comm = mesh_or_comm.cp if isinstance(mesh_or_comm, Mesh) else mesh_or_comm
    if not isinstance(comm, Communicator):
        rule = "it must be a Mesh or a Communicator"
        raise ConfigError(explain("mesh_or_comm", type(comm).__name__, rule, "Pass mesh.cp"))
    plan = _arrange(q, k, v, comm, ulysses, ring, causal, layout)
    if comm.size == 1:
        return functional.attention(q, k, v, causal=causal)
    neighbours, around = neighbours_and_ring(comm, plan.ulysses)
    first = comm.rank - comm.rank % plan.ulysses
    trade = None
    if plan.ulysses > 1:
        trade = _trade(neighbours, plan, first)
        q, k, v = ToHeads.apply(q, k, v, trade)
    if plan.ring > 1:
        held = tuple(
            _together(plan.held[start : start + plan.ulysses])
            for start in range(0, comm.size, plan.ulysses)
        )
        scale = q.shape[3] ** -0.5
        out = RingAttention.apply(q, k, v, Ring(around, held, causal, scale))
    else:
        out = functional.attention(q, k, v, causal=causal)
    return out if trade is None else ToTokens.apply(out, trade)


def attention_over(
    mesh: Mesh, layout: str = "zigzag", ulysses: int | None = None
) -> Callable[[Any, Any, Any], Any]:
    """Return the causal attention(q, k, v) of a model whose sequences are spread over mesh.cp.

    layout: as for `context_positions`, which say where this rank's tokens lie.  "contiguous" and
    "zigzag" are rings, "ulysses" trades heads, "hybrid" does both, with `ulysses` neighbours (None:
    `layout.ulysses_degree`); the degrees of the others are given by their names.  With one rank on
    mesh.cp it is the dense attention.

    Raises ConfigError for an unknown layout or a degree that does not divide mesh.cp.size.
    """
    require_layout(layout)
    size = mesh.cp.size
    if layout != "hybrid":
        ulysses = size if layout == "ulysses" else 1
    elif ulysses is None:
        ulysses = ulysses_degree(size)
    _degrees(size, ulysses, None)
    order = "zigzag" if layout in ("zigzag", "hybrid") else "contiguous"

    def attention(q: Any, k: Any, v: Any) -> Any:
        return context_attention(q, k, v, mesh, ulysses, layout=order)

    return attention


def _trade(neighbours: Communicator, plan: Arrangement, first: int) -> Trade:
    """Return the trade among neighbours, the first of which is rank `first`."""
    mine = plan.held[first : first + plan.ulysses]
    positions = np.concatenate([positions_of(ranges) for ranges in mine])
    order = np.argsort(positions)
    in_order = bool((np.diff(order) == 1).all())
    return Trade(
        neighbours,
        tuple(map(length_of, mine)),
        heads_of(plan.heads, plan.kv_heads, plan.ulysses),
        None if in_order else order,
    )


def _together(held: tuple[Ranges, ...]) -> Ranges:
    """Return the ranges of several ranks as those of one."""
    return merged([slice(*one) for ranges in held for one in ranges])


def _arrange(
    q: Any, k: Any, v: Any, comm: Communicator, ulysses: int | None, ring: int | None,
    causal: bool, layout: str | None,
) -> Arrangement:  # fmt: skip
    """Return how the call runs, once all ranks agree on it."""
    facts = dict.fromkeys(
        ("dtype", "batch", "length", "heads", "kv heads", "dim", "causal", "ulysses", "ring",
         "layout"), 0,
    )  # fmt: skip
    problem: MpiparError | None = None
    try:
        degrees = _degrees(comm.size, ulysses, ring)
        layout = layout or ("zigzag" if degrees[1] > 1 else "contiguous")
        require_layout(layout, ORDERS)
        shape, kv_heads, dtype = _checked(array(q), array(k), array(v), degrees[0])
        batch, length, heads, dim = shape
        values = (dtype, batch, length, heads, kv_heads, dim, bool(causal), *degrees)
        facts = dict(zip(facts, (*values, ORDERS.index(layout)), strict=True))
    except MpiparError as error:
        problem = error
    table = agree(comm.process_group, "context attention", facts, ("length",), problem, SHOWN)
    total = sum(table["length"])
    assert layout is not None, "checked above"
    held = tuple(ranges_of(total, comm.size, rank, layout) for rank in range(comm.size))
    _check_lengths(table, held, layout)
    return Arrangement(facts["ulysses"], facts["ring"], held, facts["heads"], facts["kv heads"])


def _degrees(size: int, ulysses: Any, ring: Any) -> tuple[int, int]:
    """Return both degrees, of which one or both may be None."""
    for name, degree in (("ulysses", ulysses), ("ring", ring)):
        whole = isinstance(degree, int | np.integer) and not isinstance(degree, bool)
        if degree is not None and (not whole or degree < 1 or size % degree):
            fits = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
            rule = f"it must divide the {size} ranks of the context-parallel group"
            raise ConfigError(explain(name, degree, rule, f"Choose from {fits}"))
    if ulysses is None:
        ulysses = 1 if ring is None else size // ring
    ring = size // ulysses if ring is None else ring
    if ulysses * ring != size:
        rule = f"ulysses * ring must be the {size} ranks of the context-parallel group"
        fix = f"Pass one of them, or ring={size // ulysses} with ulysses={ulysses}"
        raise ConfigError(explain("(ulysses, ring)", (ulysses, ring), rule, fix))
    return int(ulysses), int(ring)


def _checked(q: Any, k: Any, v: Any, ulysses: int) -> tuple[tuple[int, ...], int, int]:
    """Return q's shape, the number of kv heads, and the number of the dtype.

    Raises what `ulysses_attention` says.
    """
    shapes = (q.shape, k.shape, v.shape)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or (
        q.shape[3] != k.shape[3]
    ):  # fmt: skip
        rule = "q is [batch, local tokens, heads, dim], k and v the same with their kv heads"
        raise BufferMismatchError(explain("q, k, v shapes", shapes, rule, "Reshape them"))
    if not is_float(q.dtype) or q.dtype != k.dtype or q.dtype != v.dtype:
        given = (q.dtype.name, k.dtype.name, v.dtype.name)
        rule = "q, k and v must have one floating-point dtype"
        raise DtypeMismatchError(explain("q, k, v dtypes", given, rule, "Convert them"))
    if not q.shape[3]:
        rule = "a head has at least one number: the last dimension must not be 0"
        raise BufferMismatchError(
            explain("q, k, v shapes", shapes, rule, "Pass a dim of 1 or more")
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        rule = f"the {heads} query heads are a multiple of the kv heads"
        raise ConfigError(explain("kv heads", kv_heads, rule, "Change the number of heads"))
    if heads < ulysses:
        rule = f"each of the {ulysses} ranks that share the heads must get at least one"
        fix = f"Choose ulysses of at most {heads}, and a ring for the rest"
        raise ConfigError(explain("heads", heads, rule, fix))
    return q.shape, kv_heads, DTYPES.index(q.dtype.name)


def _check_lengths(table: Table, held: tuple[Ranges, ...], layout: str) -> None:
    """Raise BufferMismatchError, on every rank, if the local sequences are not the layout's."""
    lengths, needed = table["length"], tuple(map(length_of, held))
    if lengths != needed:
        rule = f"{sum(lengths)} tokens in layout {layout!r} are {needed} on the ranks"
        fix = "Cut them by context_positions"
        raise BufferMismatchError(explain("q.shape[1] of the ranks", lengths, rule, fix))
