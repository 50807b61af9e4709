"""Matrix products against float64: transpositions, batches, epilogues, number types, edges."""

from itertools import product
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels.matmul import Task, matmul, reference
from tests.cuda.compare import close

SIZES = {"tiny": [(5, 9, 11)], "large": [(515, 259, 131), (64, 128, 64), (1, 3, 1000)]}
PLAIN: dict[str, Any] = {}
# (dtype, batch of a, batch of b, transposed, what follows)
CASES: list[tuple[str, tuple[int, ...], tuple[int, ...], str, dict[str, Any]]] = [
    ("float32", (), (), "", PLAIN),
    ("float64", (2,), (2,), "b", PLAIN),
    ("float16", (2,), (), "a", {"bias": 1, "residual": 1}),
    ("bfloat16", (), (2,), "ab", {"activation": "silu", "up": 1}),
    ("float32", (), (), "b", {"bias": 1, "activation": "gelu", "accumulate": True}),
    ("float64", (), (), "a", {"activation": "gelu", "residual": 1, "accumulate": True}),
]


def run(xp: Any, sizes: str) -> None:
    """Compare each case; the large ones in all transpositions and number types."""
    cases = list(CASES)
    if sizes != "tiny":
        everything = product(("float32", "float64", "float16", "bfloat16"), ("", "a", "b", "ab"))
        cases += [(d, (3,), (3,), t, CASES[4][4]) for d, t in everything]
    for (m, n, k), case in product(SIZES[sizes], cases):
        _compare(xp, m, n, k, *case)
    if sizes == "tiny":
        _compare(xp, 66, 3, 1, "float32", (), (), "", PLAIN)  # more than a tile
        _compare(xp, 2, 3, 0, "float32", (), (), "", {"bias": 1})  # sums of nothing
    _views(xp)


def _compare(
    xp: Any, m: int, n: int, k: int, dtype: str, batch_a: tuple[int, ...],
    batch_b: tuple[int, ...], turned: str, after: dict[str, Any],
) -> None:  # fmt: skip
    draw = np.random.default_rng(3)

    def make(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(dtype_of(dtype))

    a = make(*batch_a, *((k, m) if "a" in turned else (m, k)))
    b = make(*batch_b, *((n, k) if "b" in turned else (k, n)))
    shape = (*np.broadcast_shapes(batch_a, batch_b), m, n)
    given = dict(after)
    for name in given.keys() & {"bias", "up", "residual"}:
        given[name] = make(n) if name == "bias" else make(*shape)
    c = make(*shape) if given.get("accumulate") else None
    task = Task(a, b, "a" in turned, "b" in turned, **given)
    wanted = reference(task, c)
    on = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    out = None if c is None else xp.asarray(c)
    got = matmul(
        xp.asarray(a), xp.asarray(b), transpose_a="a" in turned, transpose_b="b" in turned,
        out=out, implementation="simt", **on,
    )  # fmt: skip
    assert (got.shape, got.dtype.name) == (shape, dtype)
    assert out is None or got is out
    close(got, wanted, roundings=16 + k**0.5)


def _views(xp: Any) -> None:
    """Operands that are transposed views, and `out` that is not contiguous."""
    draw = np.random.default_rng(4)
    a, b = (draw.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (4, 3)))
    space = xp.zeros((5, 8), np.float32)
    got = matmul(xp.asarray(a).T, xp.asarray(b).T, out=space[:, ::2], implementation="simt")
    close(got, reference(Task(a.T, b.T)))
    close(space[:, ::2], reference(Task(a.T, b.T)))
