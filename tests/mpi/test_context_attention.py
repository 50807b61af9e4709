"""Context-parallel attention against the dense one: outputs, gradients, messages, memory."""

import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import arrays
from mpipar.autograd import Tape, Tensor, no_grad
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError, MismatchError
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.context.attend import (
    context_attention,
    ring_attention,
    ulysses_attention,
)
from mpipar.parallel.context.layout import context_positions

HEADS = ((4, 4), (8, 2), (7, 7), (12, 3), (4, 1))  # query heads, kv heads
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


class Case(NamedTuple):
    """The whole sequence, and what dense attention makes of it."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    grad: np.ndarray
    results: tuple[np.ndarray, ...]  # output, gradients of q, k and v

    def cut(self, positions: np.ndarray, dtype: Any = "float64") -> list[Tensor]:
        """Return this rank's q, k and v."""
        parts = [x[:, positions].astype(dtype) for x in (self.q, self.k, self.v)]
        return [Tensor(part, requires_grad=True) for part in parts]

    def check(self, positions: np.ndarray, out: Tensor, inputs: list[Tensor], **near: Any) -> None:
        """Run backward, and compare output and gradients with the slices of the dense ones."""
        out.backward(self.grad[:, positions].astype(out.dtype))
        found = [out.data, *(x.grad for x in inputs)]
        for name, own, whole in zip(("out", "q", "k", "v"), found, self.results, strict=True):
            expected = whole[:, positions]
            np.testing.assert_allclose(own.astype(float), expected, **near, err_msg=name)


def dense(n: int, heads: int, kv_heads: int, causal: bool, dim: int = 8, scale: float = 1) -> Case:
    rng = np.random.default_rng(n)
    q, grad = rng.standard_normal((2, 2, n, heads, dim))
    k, v = rng.standard_normal((2, 2, n, kv_heads, dim))
    whole = [Tensor(x, requires_grad=True) for x in (scale * q, k, v)]
    with Tape():
        out = F.attention(*whole, causal=causal)
        out.backward(grad)
    return Case(scale * q, k, v, grad, (out.data, *(x.grad for x in whole)))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---- numbers


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ring(comm: Communicator, layout: str, causal: bool) -> None:
    for n, (heads, kv_heads) in zip((1, 3, 8, 21, 83), HEADS, strict=True):
        case = dense(n, heads, kv_heads, causal)
        positions = context_positions(n, comm.size, comm.rank, layout)
        inputs = case.cut(positions)
        out = ring_attention(*inputs, comm, causal, layout)
        case.check(positions, out, inputs, **EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_ulysses(comm: Communicator, causal: bool) -> None:
    for n, (heads, kv_heads) in zip((1, 3, 8, 21, 83), HEADS, strict=True):
        case = dense(n, heads, kv_heads, causal)
        positions = context_positions(n, comm.size, comm.rank, "ulysses")
        inputs = case.cut(positions)
        case.check(positions, ulysses_attention(*inputs, comm, causal), inputs, **EXACT)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_hybrid(comm: Communicator, layout: str) -> None:
    for ulysses in divisors(comm.size):
        for causal, n, (heads, kv_heads) in ((True, 37, (8, 2)), (False, 6, (12, 3))):
            case = dense(n, heads, kv_heads, causal)
            positions = context_positions(n, comm.size, comm.rank, layout)
            inputs = case.cut(positions)
            out = context_attention(*inputs, comm, ulysses, causal=causal, layout=layout)
            case.check(positions, out, inputs, **EXACT)


def test_uneven_sequences_in_every_layout(world: MPI.Intracomm) -> None:
    case = dense(1003, 7, 7, True, dim=4)
    with Communicator(world) as comm, Tape():
        check_every_layout(comm, case)


def check_every_layout(comm: Communicator, case: Case) -> None:
    for layout, degrees in (
        ("contiguous", (1, comm.size)),
        ("zigzag", (1, comm.size)),
        ("ulysses", (comm.size, 1)),
        ("hybrid", (divisors(comm.size)[-1 if comm.size < 4 else 1], None)),
    ):
        positions = context_positions(1003, comm.size, comm.rank, layout)
        inputs = case.cut(positions)
        order = "contiguous" if layout in ("contiguous", "ulysses") else "zigzag"
        out = context_attention(*inputs, comm, *degrees, layout=order)
        case.check(positions, out, inputs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_short_floats(comm: Communicator, dtype: str, near: float) -> None:
    kind = arrays.dtype(dtype)
    case = dense(61, 6, 2, True)
    rounded = [x.astype(kind).astype(float) for x in case[:4]]
    whole = [Tensor(x, requires_grad=True) for x in rounded[:3]]
    out = F.attention(*whole)
    out.backward(rounded[3])
    case = Case(*rounded, (out.data, *(x.grad for x in whole)))
    positions = context_positions(61, comm.size, comm.rank, "zigzag")
    inputs = case.cut(positions, kind)
    out = ring_attention(*inputs, comm)
    assert out.dtype == kind
    case.check(positions, out, inputs, rtol=near, atol=near)


def test_huge_scores(comm: Communicator) -> None:
    case = dense(24, 2, 2, True, scale=1e4)
    positions = context_positions(24, comm.size, comm.rank, "zigzag")
    inputs = case.cut(positions)
    case.check(positions, ring_attention(*inputs, comm), inputs, rtol=1e-8, atol=1e-8)


def test_a_rank_without_a_loss_still_answers(comm: Communicator) -> None:
    case = dense(20, 4, 2, True)
    for layout in ("zigzag", "ulysses"):
        positions = context_positions(20, comm.size, comm.rank, layout)
        inputs = case.cut(positions)
        attend = ulysses_attention if layout == "ulysses" else ring_attention
        out = attend(*inputs, comm)
        loss = out.sum() if comm.rank == 0 else Tensor(0.0, requires_grad=True)
        loss.backward()
        total = comm.all_reduce(np.array([np.abs(inputs[2].grad).sum()]))
        assert total[0] > 0


# ---- messages, memory


def test_messages_of_the_ring(comm: Communicator) -> None:
    """p - 1 shifts of keys and values each way, p - 1 of their gradients; one agreement a call."""
    case = dense(24, 4, 2, True)
    positions = context_positions(24, comm.size, comm.rank, "zigzag")
    out = ring_attention(*case.cut(positions), comm)
    p = comm.size
    assert comm.calls["shift"] == p - 1
    out.sum().backward()
    assert comm.calls["shift"] == 3 * (p - 1)
    assert comm.calls.total() == 3 * (p - 1) + (p > 1) * 1
    for record in comm.process_group.flight.records:
        if "shift" in record.what:  # 2 batches, keys and values of 2 heads of 8: unexpanded
            assert f"{24 // p * 2 * 2 * 2 * 8} elements" in record.what or 24 % p, record.what


def test_messages_of_ulysses(comm: Communicator) -> None:
    case = dense(24, 4, 2, True)
    positions = context_positions(24, comm.size, comm.rank, "ulysses")
    out = ulysses_attention(*case.cut(positions), comm)
    several = int(comm.size > 1)
    assert comm.calls["all_to_all"] == 2 * several
    out.sum().backward()
    assert comm.calls["all_to_all"] == 4 * several
    assert comm.calls.total() == 5 * several


def test_the_ring_holds_two_blocks_and_no_matrix(world: MPI.Intracomm) -> None:
    """4,096 tokens a rank: 16k on four."""
    heads, dim, length = 4, 64, 4096
    block = 2 * length * heads * dim * 4
    with Communicator(world) as comm, no_grad():
        q, k, v = np.random.default_rng(comm.rank).standard_normal(
            (3, 1, length, heads, dim), np.float32
        )
        tracemalloc.start()
        out = ring_attention(q, k, v, comm)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if comm.size > 1:
        assert out.shape == q.shape
        rest = 2 * out.data.nbytes + 12 * 2**20  # the output and a part; the kernel's tiles
        assert peak < 2 * block + rest < 3 * block + 2 * out.data.nbytes + 8 * 2**20
        assert peak < heads * length * length  # bytes: a quarter of the scores of one block


def test_checked_and_reproducible_communicators(world: MPI.Intracomm) -> None:
    case = dense(21, 8, 2, True)
    with Communicator(world, check=True, reproducible=True) as comm, Tape():
        for degree in divisors(comm.size):
            positions = context_positions(21, comm.size, comm.rank, "zigzag")
            inputs = case.cut(positions)
            out = context_attention(*inputs, comm, degree, layout="zigzag")
            case.check(positions, out, inputs, **EXACT)


def test_groups_are_made_once_and_go_with_the_communicator(world: MPI.Intracomm) -> None:
    with Communicator(world) as comm, Tape():
        case = dense(16, 8, 8, True)
        positions = context_positions(16, comm.size, comm.rank, "zigzag")
        degree = divisors(comm.size)[len(divisors(comm.size)) // 2]
        for _ in range(2):
            context_attention(*case.cut(positions), comm, degree, layout="zigzag")
            made = list(comm.process_group.owned.values())
            assert len(made) == (2 if 1 < degree < comm.size else 0)
        Tensor(0.0, requires_grad=True).backward()
    assert all(part.process_group.destroyed for part in made)


# ---- bad input


def test_bad_input_is_an_error_on_every_rank(comm: Communicator) -> None:
    p = comm.size

    def draw(length: int = 4, heads: int = 4, dtype: str = "float64") -> np.ndarray:
        return np.ones((1, length, heads, 4), dtype)

    q = draw()
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "layout='ring'", lambda: ring_attention(q, q, q, comm, layout="ring")),
        (ConfigError, "kv heads=3", lambda: ring_attention(q, draw(4, 3), draw(4, 3), comm)),
        (ConfigError, "ulysses=7", lambda: context_attention(q, q, q, comm, ulysses=7)),
        (ConfigError, "ring=0", lambda: context_attention(q, q, q, comm, ring=0)),
        (BufferMismatchError, "shapes", lambda: ring_attention(q, draw(5), draw(4), comm)),
        (BufferMismatchError, "shapes", lambda: ring_attention(q[0], q[0], q[0], comm)),
        (BufferMismatchError, "must not be 0", lambda: ring_attention(*3 * [q[..., :0]], comm)),
        (DtypeMismatchError, "dtypes", lambda: ulysses_attention(q, q, draw(4, 4, "int64"), comm)),
    ]
    if p > 1:
        last = comm.rank == p - 1
        longer, other = draw(9 if last else 4), draw(4, 4, "float32" if last else "float64")
        few, wrong = draw(4, p - 1), draw(4, 3 if last else 4)
        cases += [
            (BufferMismatchError, "tokens in", lambda: ring_attention(*3 * [longer], comm)),
            (
                MismatchError,
                f"dtype=float64; rank {p - 1}: dtype=float32",
                lambda: ring_attention(*3 * [other], comm),
            ),
            (
                MismatchError,
                f"layout=zigzag; rank {p - 1}: layout=contiguous",
                lambda: ring_attention(q, q, q, comm, layout="contiguous" if last else "zigzag"),
            ),
            (ConfigError, f"heads={p - 1}", lambda: ulysses_attention(few, few, few, comm)),
            (ConfigError, "kv heads=3", lambda: ring_attention(q, wrong, wrong, comm)),
            (MismatchError, "causal=False", lambda: ring_attention(q, q, q, comm, last)),
            (ConfigError, "ring", lambda: context_attention(q, q, q, comm, p, p)),
        ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    assert comm.calls["shift"] + comm.calls["all_to_all"] == 0
    with pytest.raises(ConfigError, match="mesh_or_comm"):
        context_attention(q, q, q, MPI.COMM_WORLD)  # type: ignore[arg-type]
    ring_attention(q, q, q, comm)  # the communicator goes on
