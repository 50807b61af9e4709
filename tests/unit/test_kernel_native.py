"""Loops in machine code against the NumPy versions; how they are compiled, found and refused."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError
from mpipar.kernels import (
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    native,
    native_math,
    native_product,
    rms_norm,
    silu,
    softmax,
)
from mpipar.kernels.attention import loops as attention_loops
from mpipar.kernels.attention import native as attention_native
from mpipar.kernels.cache import cache_folder
from tests.launch import run

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.skipif(not native.compile_cpu(), reason="loops are switched off")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget the library that this process has found, before and after."""
    native._library.cache_clear()
    yield
    native._library.cache_clear()


def exponentials(x: np.ndarray) -> np.ndarray:
    """Return e^x by the very formula of the loops: softmax of (x, 0) is e^x / (e^x + 1)."""
    return np.array([native_math.exp(v) for v in x.astype(np.float32)], np.float64)


def test_the_exponential() -> None:
    with np.errstate(over="ignore"):  # of the result that is not taken
        x = np.linspace(-87.2, 88.2, 5001).astype(np.float32)
        expected = np.exp(x.astype(np.float64))
        assert np.abs(exponentials(x) / expected - 1).max() < 2.5e-7
        assert exponentials(np.array([-np.inf, -88, 0, 89, np.inf])).tolist() == [
            0, 0, 1, np.inf, np.inf,
        ]  # fmt: skip


def test_order_of_bits() -> None:
    x = np.array([-np.inf, -3.5, -0.0, 0.0, 1e-40, 2, np.inf], np.float32)
    keys = [native_math.ordered(v.view(np.int32)) for v in x]
    assert keys == sorted(keys)
    assert [native_math.ordered(k).view(np.float32) for k in keys] == x.tolist()
    assert native_math.largest(x, 0, 5) == x[4]


OPERATIONS = {
    "softmax": (softmax.forward, [(5, 33)]),
    "softmax backward": (softmax.backward, [(5, 33)] * 2),
    "gelu": (gelu.forward, [(4, 37)]),
    "gelu backward": (gelu.backward, [(4, 37)] * 2),
    "silu": (silu.forward, [(4, 37)]),
    "silu backward": (silu.backward, [(4, 37)] * 2),
    "swiglu": (silu.swiglu, [(4, 37)] * 2),
    "swiglu backward": (silu.swiglu_backward, [(4, 37)] * 3),
    "layer_norm": (layer_norm.forward, [(4, 37), (37,), (37,)]),
    "rms_norm": (rms_norm.forward, [(4, 37), (37,)]),
    "embedding backward": (
        lambda g: embedding.scatter_add(g, np.array([1, 0, 1, 2]), 4), [(4, 37)],
    ),
    "cross_entropy": (
        lambda x: cross_entropy.forward(x, np.array([3, 0, -100, 1]), 0.1, -100, True), [(4, 37)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_both_versions_agree_on_numbers_that_are_none(name: str) -> None:
    """NaN comes out where NumPy's version gives it; nothing is made of it that looks right."""
    call, shapes = OPERATIONS[name]
    for place in range(len(shapes)):
        inputs = [normal(*shape) for shape in shapes]
        inputs[place].reshape(-1)[-1] = np.nan
        with np.errstate(invalid="ignore"):
            results = [call(*[x.astype(kind) for x in inputs]) for kind in ("f4", "f8")]
        for ours, twin in zip(*[_arrays(r) for r in results], strict=True):
            assert ours.dtype == np.float32
            assert np.array_equal(np.isnan(ours), np.isnan(twin)), name
            assert np.allclose(ours, twin, rtol=1e-5, atol=3e-6, equal_nan=True)


def _arrays(result: object) -> list[np.ndarray]:
    """Return the arrays of a nested result."""
    if isinstance(result, tuple):
        return [x for part in result for x in _arrays(part)]
    assert isinstance(result, np.ndarray)
    return [result]


def test_large_numbers() -> None:
    x = np.array([-3e38, -1e5, -100, -30, 30, 100, 1e5], np.float32)
    ones = np.ones_like(x)
    expected = np.maximum(x, 0)
    assert np.allclose(gelu.forward(x), expected)
    assert np.allclose(silu.forward(x), expected, atol=1e-10)
    assert np.allclose(gelu.backward(ones, x), x > 0)
    assert np.allclose(silu.backward(ones, x), x > 0, atol=1e-10)
    assert np.allclose(silu.swiglu(x, ones), expected, atol=1e-10)


def test_a_row_does_not_depend_on_the_others() -> None:
    """A rank with a part of the rows has their very bits."""
    x, w, b = normal(50, 37), normal(37), normal(37)
    whole, part = layer_norm.forward(x, w, b)[0], layer_norm.forward(x[7:23].copy(), w, b)[0]
    assert np.array_equal(whole[7:23], part)
    assert np.array_equal(gelu.forward(x)[7:23], gelu.forward(x[7:23].copy()))


def test_backward_sums_of_many_rows() -> None:
    """dw and db of 5,000 rows are as good as those in float64, rounded."""
    g, x, w = normal(5000, 9), normal(5000, 9), normal(9)
    _, stats = layer_norm.forward(x, w, w)
    ours = layer_norm.backward(g, x, w, stats)
    wide = [a.astype(np.float64) for a in (g, x, w)]
    _, stats = layer_norm.forward(wide[1], wide[2], wide[2])
    for a, b in zip(ours, layer_norm.backward(*wide, stats), strict=True):
        assert np.abs(a - b).max() < 1e-4


def test_only_float32_and_contiguous() -> None:
    x = normal(4, 6)
    assert native.usable(x, x)
    assert not native.usable(x, x.T)
    assert not native.usable(x.astype(np.float64))
    assert not native.usable(x.astype(np.float16))


@pytest.mark.usefixtures("fresh")
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPAR_NUMBA", "0")
    assert not native.compile_cpu()
    assert not native.usable(normal(2))
    with pytest.raises(ConfigError, match="MPIPAR_NUMBA"):
        native.loop(gelu.forward_loop.python)(normal(2), normal(2), 2)


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "false")
    with pytest.raises(ConfigError, match="MPIPAR_NUMBA=0"):
        native.compile_cpu()


ALONE = """
import sys
from pathlib import Path
import numpy as np
from mpipar.kernels import gelu, native, native_build
native.MODULES = ("gelu",)
native_build.main(Path(sys.argv[1]) / "loops")
library = native._load(Path(sys.argv[1]) / "loops.o")
native._library = lambda: library
assert abs(gelu.forward(np.ones(5, np.float32)) - 0.841192).max() < 1e-6
"""


def test_without_a_linker(tmp_path: Path) -> None:
    """LLVM puts the object file into memory."""
    env = {**os.environ, "PATH": str(tmp_path)}
    done = run([sys.executable, "-c", ALONE, str(tmp_path)], env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("fresh")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file is compiled in a folder that is deleted once it is loaded."""
    name = f"loops-{native._key(metadata.version('numba'))}"
    done = native._find(cache_folder(), name)
    assert done is not None
    folders = []

    def compiled(folder: Path, name: str) -> Path:
        folders.append(folder)
        return Path(shutil.copy(done, folder))

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native, "_compile", compiled)
    assert native.compile_cpu()
    assert not folders[0].exists()


LOADED = """
import sys
from mpipar.kernels import native
assert native.compile_cpu()
print(sorted({"numba", "llvmlite"} & set(sys.modules)))
"""


def test_a_rank_loads_no_compiler() -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no linker here")
    done = run([sys.executable, "-c", LOADED])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(("n", "add"), [(16, False), (32, True), (48, True)])
def test_small_products_as_they_are_written(n: int, add: bool) -> None:
    depth, space = 5, np.zeros(2000, np.float32)
    a, b, c = normal(8, depth), normal(depth, n), normal(8, n)
    space[:40], space[100 : 100 + depth * n] = a.T.reshape(-1), b.reshape(-1)
    space[500 : 500 + 8 * n] = c.reshape(-1)
    native_product.columns(space, 500, n, space, 0, 1, 8, space, 100, n, depth, add, n)
    result = space[500 : 500 + 8 * n].reshape(8, n)
    assert np.allclose(result, a @ b + (c if add else 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_in_pieces_is_the_same(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, do = normal(2, 70, 2, 24), normal(2, 70, 2, 24)
    k, v = normal(2, 50, kv_heads, 24), normal(2, 50, kv_heads, 24)
    mask, calls, results = attention.Mask(True, 0.2, 5), [0, 0], []
    for turn, work in enumerate((attention_native.WORK, 1)):
        monkeypatch.setattr(attention_native, "WORK", work)

        def count(turn: int = turn) -> None:
            calls[turn] += 1

        o, lse = attention.forward(q, k, v, mask, count)
        delta = attention.row_delta(do, o)
        results.append((o, lse, *attention.backward(do, q, k, v, lse, delta, mask, count)))
    assert calls == [2, 2 * 2 * kv_heads * 2]  # 70 queries are 2 pieces of 64
    for one, other in zip(*results, strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)  # sums in another order


def test_attention_loops_take_views_and_leave_other_numbers_to_numpy() -> None:
    x = normal(1, 9, 6, 16)
    assert attention_native.suits(x[:, :, :2], x[:, ::-1, 2:4], np.broadcast_to(x[:, :1], x.shape))
    assert not attention_native.suits(x.astype(np.float64))
    assert not attention_native.suits(x[..., ::2])
    assert not attention_native.suits(x, x[..., :8])
    assert not attention_native.suits(x[:, :0])


@pytest.mark.parametrize("ahead", [0, -3, 4])
def test_attention_loops_as_they_are_written(ahead: int) -> None:
    """What Python makes of the loops is what the machine code does."""
    q, k, v, do = normal(1, 10, 2, 8), normal(1, 9, 1, 8), normal(1, 9, 1, 8), normal(1, 10, 2, 8)
    mask, results = attention.Mask(True, 0.3, ahead), []
    for kind in ("compiled", "python"):
        with pytest.MonkeyPatch.context() as patch:
            if kind == "python":
                for name in ("forward_loop", "backward_loop"):
                    patch.setattr(attention_loops, name, _in_python(getattr(attention_loops, name)))
            o, lse = attention.forward(q, k, v, mask)
            delta = attention.row_delta(do, o)
            results.append((o, lse, *attention.backward(do, q, k, v, lse, delta, mask)))
    for one, other in zip(*results, strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


def _in_python(compiled: native.Loop) -> Callable[..., None]:
    """Return a loop as it is written, of flat arrays, with their views' memory."""

    def flat(x: object) -> object:
        return x.reshape(-1) if isinstance(x, np.ndarray) else x

    return lambda *arguments: compiled.python(*[flat(x) for x in arguments])


def kept(y: Tensor, *inputs: Tensor) -> int:
    """Return the bytes that an operation keeps for backward, besides its inputs."""
    vjps = y.node.vjp if isinstance(y.node.vjp, tuple) else (y.node.vjp,)
    found = [cell.cell_contents for f in vjps for cell in f.__closure__ or ()]
    arrays = [x for part in found for x in (part if isinstance(part, tuple) else (part,))]
    given = [id(x.data) for x in inputs]
    return sum(x.nbytes for x in arrays if isinstance(x, np.ndarray) and id(x) not in given)


def test_activations_are_not_kept_twice() -> None:
    """Backward takes its inputs and computes the rest again; norms keep two numbers a row."""
    x, w = Tensor(normal(6, 50), True), Tensor(normal(50), True)
    assert kept(F.gelu(x), x) == kept(F.silu(x), x) == 0
    assert kept(F.layer_norm(x, w, w), x, w) == 6 * 2 * 4
    assert kept(F.rms_norm(x, w), x, w) == 6 * 4
