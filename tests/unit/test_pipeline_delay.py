"""Backward in two parts: the same gradients, hooks and end of backward as in one."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from mpipar import nn
from mpipar.autograd import Delay, Tensor, after_backward, recompute
from mpipar.autograd import functional as F

X = np.random.default_rng(0).normal(size=(3, 5, 8))


class Net(nn.Module):
    """Products of both kinds, a norm, a shared weight, and weights that are shared with matmul."""

    def __init__(self) -> None:
        self.first = nn.Linear(8, 8, seed=1, name="first", dtype="float64")
        self.norm = nn.LayerNorm(8, name="norm", dtype="float64")
        self.plain = nn.Parameter(np.random.default_rng(2).normal(size=(8, 8)))
        self.offset = nn.Parameter(np.zeros(8))
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(F.gelu(self.first(x)))
        h = recompute(self.middle, h, self.first.weight) if self.again else self.middle(h)
        return F.linear(h, self.first.weight) + self.offset

    def middle(self, h: Tensor, weight: Tensor | None = None) -> Tensor:
        h = h @ self.plain + self.offset
        return F.linear(h, self.first.weight if weight is None else weight)


def gradients(net: Net) -> dict[str, np.ndarray]:
    return {name: np.array(param.grad) for name, param in net.named_parameters()}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("homes", [False, True])
def test_numbers_hooks_and_end(again: bool, homes: bool) -> None:
    net = Net()
    net.again = again
    x = Tensor(X, requires_grad=True)
    (net(x) ** 2).sum().backward()
    expected, dx = gradients(net), x.grad
    net.zero_grad()
    fired: list[str] = []
    handles = [
        param.register_hook(partial(lambda name, _: fired.append(name), name))
        for name, param in net.named_parameters()
    ]
    for param in net.parameters():
        param.home = np.empty_like(param.data) if homes else None
    ended = after_backward(lambda: fired.append("end"))
    for _ in range(2):
        fired.clear()
        x = Tensor(X, requires_grad=True)
        with Delay(net.parameters()) as delay:
            (net(x) ** 2).sum().backward()
        np.testing.assert_array_equal(x.grad, dx)
        assert set(fired) == {"norm.weight", "norm.bias"}
        delay.run()
        assert sorted(fired[:-1]) == sorted(expected)
        assert fired[-1] == "end"
    ended.remove()
    for handle in handles:
        handle.remove()
    for name, grad in gradients(net).items():
        np.testing.assert_allclose(grad, 2 * expected[name], rtol=1e-13, atol=1e-13)


def test_weights_get_nothing_before() -> None:
    net: Any = nn.Linear(8, 8, seed=1, dtype="float64")
    x = Tensor(X, requires_grad=True)
    with Delay([net.weight]) as delay:  # the bias is not among them, so linear runs at once
        net(x).sum().backward()
    assert net.weight.grad is not None
    net.zero_grad()
    with Delay(net.parameters()) as delay:
        net(x).sum().backward()
    assert net.weight.grad is None
    assert net.bias.grad is None
    assert x.grad is not None
    delay.run()
    np.testing.assert_allclose(
        np.asarray(net.weight.grad), np.tile(X.sum((0, 1)), (8, 1)), rtol=1e-12
    )
    np.testing.assert_allclose(np.asarray(net.bias.grad), 15.0)
