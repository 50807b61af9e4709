"""Gradients that lie where a parameter's `home` says, and the end of backward."""

from typing import Any

import numpy as np
import pytest

import mpipar as mp
from mpipar.nn import Parameter


def parameter(shape: tuple[int, ...], hooked: bool = True) -> tuple[Parameter, np.ndarray]:
    param = Parameter(np.random.default_rng(0).standard_normal(shape))
    param.home = np.full(shape, np.nan)
    if hooked:
        param.register_hook(lambda p: None)
    return param, param.home


USES: dict[str, Any] = {
    "linear": lambda w: (mp.functional.linear(np.ones((3, 4)), w) ** 2).sum(),
    "linear twice": lambda w: (
        (mp.functional.linear(np.ones((3, 4)), w * 1.0 + w)).sum()
        + (mp.functional.linear(np.full((2, 4), 3.0), w)).sum()
    ),
    "two products": lambda w: (
        mp.functional.linear(np.ones((3, 4)), w).sum()
        + mp.functional.linear(np.full((2, 4), 3.0), w).sum()
    ),
    "view": lambda w: w.reshape(-1)[2:9].sum(),
    "embedding": lambda w: mp.functional.embedding(np.array([4, 0, 4]), w).sum(),
    "recomputed": lambda w: mp.recompute(lambda x: (x @ w.T).exp(), mp.Tensor(np.ones(4))).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_the_gradient_is_written_at_home(use: str) -> None:
    param, home = parameter((5, 4))
    plain = Parameter(param.data)
    for number in (1, 2):  # the second is added
        USES[use](param).backward()
        USES[use](plain).backward()
        assert param.grad is home, number
        np.testing.assert_array_equal(param.grad, plain.grad)
    param.grad = None
    USES[use](param).backward()
    np.testing.assert_allclose(home, plain.grad / 2)


def test_a_gradient_that_is_elsewhere_stays_there() -> None:
    param, home = parameter((5, 4))
    param.grad = mine = np.ones((5, 4))
    USES["linear"](param).backward()
    assert param.grad is mine
    assert np.isnan(home).all()


def test_other_dtypes_and_no_dimensions() -> None:
    param, home = parameter(())
    (param * 3.0).backward()
    assert param.grad is home
    assert home == 3.0


def test_the_end_comes_once_when_gradients_are_there() -> None:
    w = mp.Tensor(np.ones(3), requires_grad=True)
    seen: list[Any] = []
    handle = mp.after_backward(lambda: seen.append(w.grad.copy()))
    mp.recompute(lambda x: (x * w).exp(), mp.Tensor(np.zeros(3))).sum().backward()
    np.testing.assert_array_equal(seen, [np.zeros(3)])
    mp.Tensor(1.0).backward()
    assert len(seen) == 2
    handle.remove()
    (w * 2.0).sum().backward()
    assert len(seen) == 2
