"""Parameters in any memory order, and gradients and settings that an optimiser must refuse."""

import numpy as np
import pytest

import mpipar as mp
from mpipar.errors import BufferMismatchError, ConfigError


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", [mp.optim.SGD, mp.optim.AdamW])
def test_the_order_in_memory_makes_no_difference(dtype: str, kind) -> None:
    values = mp.Tensor(np.arange(6.0).reshape(2, 3)).astype(dtype).data
    spread = np.zeros((2, 6), values.dtype)
    spread[:, ::2] = values
    results = []
    for data in (values.copy(), np.asfortranarray(values), spread[:, ::2]):
        param = mp.nn.Parameter(data)
        optimiser = kind([param], lr=0.5)
        for _ in range(2):
            param.grad = np.ones_like(data)
            optimiser.step()
        results.append(param.data.astype("float64"))
    assert (results[0] != values.astype("float64")).all()
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_a_gradient_of_another_shape_is_refused_before_any_update() -> None:
    first, second = (mp.nn.Parameter(np.ones((2, 3))) for _ in range(2))
    optimiser = mp.optim.SGD([first, second], lr=1.0)
    first.grad, second.grad = np.ones((2, 3)), np.ones((1, 3))
    with pytest.raises(BufferMismatchError, match=r"grad.shape.*\(1, 3\).*\(2, 3\)"):
        optimiser.step()
    assert (first.data == 1.0).all()


@pytest.mark.parametrize("value", [-1, float("nan"), "fast"])
def test_a_rate_that_cannot_be_is_refused_whenever_it_is_set(value) -> None:
    optimiser = mp.optim.AdamW([mp.nn.Parameter(np.ones(2))])
    with pytest.raises(ConfigError, match="lr="):
        optimiser.lr = value
    optimiser.param_groups[0]["weight_decay"] = value
    with pytest.raises(ConfigError, match="weight_decay"):
        optimiser.step()
