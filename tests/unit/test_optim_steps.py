"""The optimisers against their formulas in plain NumPy float64."""

import numpy as np
import pytest

from mpipar.arrays import dtype as as_dtype
from mpipar.errors import ConfigError
from mpipar.nn import Linear, Parameter, Sequential, Spec
from mpipar.optim import SGD, Adam, AdamW

STEPS = 5
SHAPES = {"w": (4, 3), "b": (4,)}


def numbers(seed, shape, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(as_dtype(dtype))


def parameters(dtype="float64"):
    return [
        Parameter(numbers(n, shape, dtype), Spec.replicated(name, shape))
        for n, (name, shape) in enumerate(SHAPES.items())
    ]


def train(optimizer, params, scale=1.0, dtype="float64", steps=STEPS):
    for step in range(steps):
        for number, param in enumerate(params):
            param.grad = numbers(100 + 10 * step + number, param.shape, dtype)
        optimizer.step(grad_scale=scale)


def formula(number, shape, update, scale=1.0, dtype="float64"):
    """The value of parameter `number` after STEPS of update(w, g, state, t)."""
    w, state = numbers(number, shape, dtype).astype(np.float64), {}
    for step in range(STEPS):
        g = numbers(100 + 10 * step + number, shape, dtype).astype(np.float64)
        w = update(w, g * scale, state, step + 1)
    return w


def sgd(lr, momentum, decay):
    def update(w, g, state, t):
        g = g + decay * w
        if momentum:
            g = state["b"] = momentum * state["b"] + g if t > 1 else g
        return w - lr * g

    return update


def adam(lr, betas, eps, decay, decoupled):
    def update(w, g, state, t):
        if decoupled:
            w = w - lr * decay * w
        else:
            g = g + decay * w
        m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g**2
        return w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)

    return update


def check(params, update, scale=1.0, dtype="float64", tolerance=1e-14):
    for number, param in enumerate(params):
        expected = formula(number, param.shape, update, scale, dtype)
        np.testing.assert_allclose(
            param.data.astype(np.float64), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd(momentum, decay):
    params = parameters()
    train(SGD(params, 0.1, momentum, decay, decay_all=True), params, scale=0.5)
    check(params, sgd(0.1, momentum, decay), scale=0.5)


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_adam(kind, decay, scale):
    params = parameters()
    optimizer = kind(params, 0.01, (0.8, 0.95), 1e-6, decay, decay_all=True)
    train(optimizer, params, scale)
    check(params, adam(0.01, (0.8, 0.95), 1e-6, decay, kind is AdamW), scale)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_biases_and_norms_do_not_decay(kind):
    decayed, plain = parameters(), parameters()
    train(kind(decayed, 0.01, weight_decay=0.5), decayed)
    train(kind(plain, 0.01, weight_decay=0.0), plain)
    assert not np.allclose(decayed[0].data, plain[0].data)
    np.testing.assert_array_equal(decayed[1].data, plain[1].data)


def test_the_rule_goes_by_global_dimensions():
    shard = Parameter(np.ones(6), Spec.replicated("flat", (4, 3)))  # a flattened block of a weight
    groups = AdamW([shard, Parameter(np.ones(3))]).param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert groups[0]["params"] == [shard]


def test_groups_state_their_own_rate_and_decay():
    first, second = parameters()
    optimizer = SGD(
        [{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.2}], 0.1
    )
    train(optimizer, [first, second])
    check([first], sgd(0.5, 0, 0.0))
    expected = formula(1, second.shape, sgd(0.1, 0, 0.2))
    np.testing.assert_allclose(second.data, expected, rtol=1e-14)
    assert optimizer.lr == 0.5
    optimizer.lr = 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_groups_state_any_setting():
    first, second = parameters()
    optimizer = AdamW(
        [
            {"params": first, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
            {"params": iter([second]), "lr": 0.02},
        ],
        0.01,
    )
    train(optimizer, [first, second])
    check([first], adam(0.01, (0.8, 0.95), 1e-6, 0.1, True))
    expected = formula(1, second.shape, adam(0.02, (0.9, 0.999), 1e-8, 0.0, True))
    np.testing.assert_allclose(second.data, expected, rtol=1e-14)

    first, second = parameters()
    optimizer = SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], 0.1)
    assert sorted(optimizer.state_dict()) == ["b.step", "w.momentum", "w.step"]
    train(optimizer, [first, second])
    check([first], sgd(0.1, 0.9, 0.0))
    np.testing.assert_allclose(second.data, formula(1, second.shape, sgd(0.1, 0.0, 0.0)))


def test_settings_of_a_group_may_change_later():
    params, others = parameters(), parameters()
    optimizer, other = SGD(params, 0.1), SGD(others, 0.1, momentum=0.9)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, params)
    train(other, others)
    for param, expected in zip(params, others, strict=True):
        np.testing.assert_array_equal(param.data, expected.data)


def test_an_optimiser_shows_its_groups():
    assert repr(AdamW(parameters(), 0.01)) == (
        "AdamW(\n"
        "  group 0: 1 parameter, lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01\n"
        "  group 1: 1 parameter, lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0\n"
        ")"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_sixteen_bit_parameters_are_updated_through_float32_masters(dtype, kind):
    params = parameters(dtype)
    if kind == "sgd":
        optimizer, update = SGD(params, 1e-3, 0.9), sgd(1e-3, 0.9, 0.0)
    else:
        optimizer = AdamW(params, 1e-3, weight_decay=0.0)
        update = adam(1e-3, (0.9, 0.999), 1e-8, 0.0, True)
    train(optimizer, params, dtype=dtype)
    state = optimizer.state_dict()
    for number, (name, shape) in enumerate(SHAPES.items()):
        master = state[f"{name}.master"]
        assert master.dtype == np.float32
        np.testing.assert_allclose(
            master, formula(number, shape, update, dtype=dtype), rtol=2e-6, atol=1e-6
        )
        assert params[number].dtype == as_dtype(dtype)
        np.testing.assert_array_equal(params[number].data, master.astype(as_dtype(dtype)))


def test_steps_too_small_for_sixteen_bits_add_up():
    param = Parameter(np.ones(1, np.float16))
    optimizer = SGD([param], 1e-4)
    for _ in range(100):
        param.grad = np.ones(1, np.float16)
        optimizer.step()
    assert abs(float(param.data[0]) - 0.99) < 1e-3


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_strided_views_and_single_numbers_are_updated_too(kind):
    memory = numbers(0, (3, 8))
    strided, solid = Parameter(memory[:, ::2]), Parameter(memory[:, ::2].copy())
    single = Parameter(np.array(2.0))
    for param in (strided, solid, single):
        param.grad = np.ones(param.shape).T.copy().T
    kind([strided, solid, single], 0.1).step()
    np.testing.assert_array_equal(strided.data, solid.data)
    assert np.shares_memory(strided.data, memory)
    assert single.data.shape == ()
    np.testing.assert_allclose(single.data, 1.9, rtol=1e-7)


def test_a_parameter_without_gradient_is_skipped_and_keeps_its_own_count():
    first, second = parameters()
    optimizer = AdamW([first, second], 0.01, weight_decay=0.0)
    before = second.data.copy()
    first.grad = np.ones(first.shape)
    optimizer.step()
    np.testing.assert_array_equal(second.data, before)
    second.grad = np.full(second.shape, 3.0)
    optimizer.step()
    np.testing.assert_allclose(second.data, before - 0.01, rtol=1e-7)  # Adam's first step is lr
    state = optimizer.state_dict()
    assert (state["w.step"].item(), state["b.step"].item()) == (2, 1)


def test_gradients_are_left_alone_until_zero_grad():
    for kind in (SGD, Adam, AdamW):
        params = parameters()
        optimizer = kind(params, 0.1, weight_decay=0.1)
        gradient = np.ones(params[0].shape)
        params[0].grad = gradient.copy()
        optimizer.step(grad_scale=0.5)
        np.testing.assert_array_equal(params[0].grad, gradient)
        optimizer.zero_grad()
        assert params[0].grad is None


def test_state_moves_to_another_optimiser():
    params, others = parameters(), parameters()
    optimizer, other = (AdamW(p, 0.01) for p in (params, others))
    train(optimizer, params, steps=3)
    assert sorted(optimizer.state_dict()) == ["b.m", "b.step", "b.v", "w.m", "w.step", "w.v"]
    for param, source in zip(others, params, strict=True):
        param.data[...] = source.data
    other.load_state_dict({key: value.copy() for key, value in optimizer.state_dict().items()})
    train(optimizer, params, steps=2)
    train(other, others, steps=2)
    for param, source in zip(others, params, strict=True):
        np.testing.assert_array_equal(param.data, source.data)


def test_state_specs_are_those_of_the_parameters():
    spec = Spec.replicated("w", (8, 3)).shard("tp", 0, 1, 2)
    optimizer = AdamW([Parameter(np.ones((4, 3)), spec)])
    specs = optimizer.state_specs()
    assert specs["w.m"].pieces == spec.pieces
    assert specs["w.step"].shape == (1,)


def test_unnamed_parameters_are_numbered():
    optimizer = SGD([Parameter(np.ones(2)), Parameter(np.ones(2))], 0.1, momentum=0.9)
    assert sorted(optimizer.state_dict()) == ["0.momentum", "0.step", "1.momentum", "1.step"]


def test_state_that_does_not_fit_is_refused():
    optimizer = SGD(parameters(), 0.1, momentum=0.9)
    state = optimizer.state_dict()
    wrong = {**state, "w.momentum": np.zeros(5), "x.momentum": np.zeros(1)}
    del wrong["b.step"]
    with pytest.raises(ConfigError) as error:
        optimizer.load_state_dict(wrong)
    assert all(name in str(error.value) for name in ("b.step", "w.momentum", "x.momentum"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"eps": -1.0}, "eps"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": "0.1"}, "lr='0.1': it must be a number"),
        ({"betas": 0.9}, "betas=0.9: it must be two numbers"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\): it must be two numbers"),
    ],
)
def test_values_out_of_range_are_refused(arguments, name):
    with pytest.raises(ConfigError, match=name):
        AdamW(parameters(), **arguments)


def test_no_parameters_or_one_twice_is_refused():
    with pytest.raises(ConfigError, match="nothing to optimise"):
        SGD([], 0.1)
    param = parameters()[0]
    with pytest.raises(ConfigError, match="once"):
        SGD([param, param], 0.1)


LAYER = Linear(3, 2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (LAYER, r"params='Linear': .* Pass module\.parameters\(\)"),
        (Sequential(LAYER), r"params='Sequential': .* Pass module\.parameters\(\)"),
        (LAYER.named_parameters(), r"params\[0\]='tuple': .* instead of named_parameters\(\)"),
        ([np.ones(3)], r"params\[0\]='ndarray': .*mp\.nn\.Parameter\(array\)"),
        ([LAYER.weight, 3.0], r"params\[1\]='float': it must be a Tensor"),
        (LAYER.weight, r"params='Parameter': .* Pass a list: \[tensor\]"),
        ([LAYER.weight * 2], "must be a leaf"),
        (3, "params='int': it must be an iterable"),
        ([[LAYER.weight]], r"params\[0\]='list'"),
        ({"params": [LAYER.weight]}, r"params=\['params'\]: groups must come in a list"),
        ([{"params": [LAYER.weight]}, LAYER.bias], r"params\[1\]='Parameter': .*all of them"),
        ([{"params": LAYER}], r"params\[0\]\['params'\]='Linear': it must be an iterable"),
        ([{"params": [LAYER.weight], "beta": 1}], r"keys of params\[0\]=.*lr, betas, .*'beta'"),
        ([{"params": [LAYER.weight], "momentum": 0.9}], "Leave out 'momentum'"),
        ([{"lr": 0.1}], "Add params"),
        ([{"params": []}], "nothing to optimise"),
        ([{"params": [LAYER.weight], "lr": -1.0}], r"params\[0\]\['lr'\]=-1"),
        ([{"params": [LAYER.weight], "betas": (0.9, 1)}], r"params\[0\]\['betas'\]\[1\]=1"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused_with_the_fix(params, message):
    with pytest.raises(ConfigError, match=message):
        AdamW(params)
