"""Each layer against its formula in NumPy, its initial values, and its errors."""

from collections import defaultdict
from functools import partial
from itertools import combinations, count

import numpy as np
import pytest

from mpipar import rng
from mpipar.autograd import Tensor, gradcheck, recompute
from mpipar.errors import ConfigError
from mpipar.nn import Dropout, Embedding, LayerNorm, Linear, RMSNorm, init
from mpipar.nn.dropout import row_index
from tests.unit.substitute import substitute


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_linear():
    layer = Linear(3, 4, seed=1, name="a.b", dtype="float64")
    x = numbers(2, 5, 3)
    expected = x @ layer.weight.data.T + layer.bias.data
    np.testing.assert_allclose(layer(Tensor(x)).data, expected, rtol=1e-14)
    assert layer.weight.spec.name == "a.b.weight"
    assert layer.bias.spec.name == "a.b.bias"
    assert Linear(3, 4, bias=False).bias is None


def test_linear_starts_as_pytorch_does_or_normal():
    layer = Linear(100, 200, dtype="float64")
    for parameter in (layer.weight, layer.bias):
        assert np.abs(parameter.data).max() <= 0.1
        assert np.abs(parameter.data).max() > 0.09
    normal = Linear(100, 200, std=0.02, dtype="float64")
    assert abs(normal.weight.data.std() - 0.02) < 5e-4
    assert (normal.bias.data == 0).all()


def test_seed_and_name_decide_the_numbers():
    def weight(**how):
        return Linear(3, 4, **how).weight.data

    np.testing.assert_array_equal(weight(seed=1, name="a"), weight(seed=1, name="a"))
    assert not np.array_equal(weight(seed=1, name="a"), weight(seed=2, name="a"))
    assert not np.array_equal(weight(seed=1, name="a"), weight(seed=1, name="b"))


@pytest.mark.parametrize("kind", [Linear, Embedding])
def test_layers_without_seed_and_name_are_not_equal(kind):
    make = partial(kind, 3, 4)
    one, two = make(), make()
    assert not np.array_equal(one.weight.data, two.weight.data)
    for other in (make(seed=0), make(seed=1)):  # nor like any with a stated seed
        assert not np.array_equal(one.weight.data, other.weight.data)
    np.testing.assert_array_equal(make(seed=0).weight.data, make(seed=0).weight.data)
    np.testing.assert_array_equal(make(name="a").weight.data, make(name="a", seed=0).weight.data)


def test_the_seeds_of_unnamed_layers_are_counted_by_kind(monkeypatch):
    def seeds():
        monkeypatch.setattr(init, "_unnamed", defaultdict(count))
        return [init.seed_of(None, "", kind) for kind in ("weights", "dropout", "weights")]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3
    dropout = seeds()[1]
    monkeypatch.setattr(init, "_unnamed", defaultdict(count))
    assert init.seed_of(None, "", "dropout") == dropout
    assert (init.seed_of(5, ""), init.seed_of(5, "a"), init.seed_of(None, "a")) == (5, 5, 0)


def test_embedding_and_its_logits():
    layer = Embedding(7, 4, name="table", dtype="float64")
    ids = np.array([[0, 6, 3], [2, 2, 1]])
    rows = layer(ids)
    np.testing.assert_array_equal(rows.data, layer.weight.data[ids])
    np.testing.assert_allclose(layer.logits(rows).data, rows.data @ layer.weight.data.T, rtol=1e-14)
    assert layer.weight.spec.name == "table.weight"


def test_ids_outside_the_table_are_named():
    layer = Embedding(7, 4)
    for bad in (7, -1, 300):
        with pytest.raises(ConfigError, match=rf"ids\[1, 2\]={bad}: .*vocabulary of 7"):
            layer(np.array([[0, 6, 3], [2, 2, bad]]))
    with pytest.raises(ConfigError, match="integers"):
        layer(np.zeros(3))
    assert layer(np.zeros((2, 0), np.int64)).shape == (2, 0, 4)


def test_norms():
    x = numbers(2, 3, 8)
    layer = LayerNorm(8, eps=1e-3, dtype="float64")
    layer.weight.data[...] = numbers(8, seed=1)
    layer.bias.data[...] = numbers(8, seed=2)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    expected = expected * layer.weight.data + layer.bias.data
    np.testing.assert_allclose(layer(Tensor(x)).data, expected, rtol=1e-12, atol=1e-13)

    root = RMSNorm(8, eps=1e-3, dtype="float64")
    root.weight.data[...] = numbers(8, seed=3)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * root.weight.data
    np.testing.assert_allclose(root(Tensor(x)).data, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [Linear, LayerNorm, RMSNorm])
def test_gradients_of_the_layers(kind):
    layer = kind(4, 5, dtype="float64") if kind is Linear else kind(4, dtype="float64")

    def call(x, *values):
        with substitute(layer, values):
            return layer(x)

    assert gradcheck(call, [numbers(2, 3, 4), *layer.parameters()])


def test_the_gradient_of_a_tied_table():
    table = Embedding(5, 4, dtype="float64")

    def call(weight):
        with substitute(table, [weight]):
            return table.logits(table(np.array([1, 4, 1])))

    assert gradcheck(call, table.weight)


def test_dropout_keeps_the_mean_and_is_off_in_eval():
    layer = Dropout(0.25, seed=3, name="d")
    x = Tensor(np.ones((8, 50, 20)))
    y = layer(x).data
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert abs((y == 0).mean() - 0.25) < 0.02
    layer.eval()
    assert layer(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_masks_do_not_depend_on_the_split():
    layer = Dropout(0.5, seed=3, name="d")
    x = np.ones((6, 8, 4))
    with rng.at(step=5, row=0):
        whole = layer(Tensor(x), np.arange(8)).data
        np.testing.assert_array_equal(layer(Tensor(x)).data, whole)
    for rows in (slice(0, 2), slice(2, 6)):
        with rng.at(step=5, row=rows.start):
            np.testing.assert_array_equal(layer(Tensor(x[rows])).data, whole[rows])
    there = np.array([6, 7, 0, 1])  # positions of a zigzag shard
    with rng.at(step=5, row=0):
        part = layer(Tensor(x[:, there]), there).data
        each = layer(Tensor(x[:, there]), np.tile(there, (6, 1))).data
    np.testing.assert_array_equal(part, whole[:, there])
    np.testing.assert_array_equal(each, whole[:, there])
    with rng.at(step=6, row=0):
        assert not np.array_equal(layer(Tensor(x)).data, whole)
    assert not np.array_equal(Dropout(0.5, seed=3, name="e")(Tensor(x)).data, whole)


def test_every_call_of_dropout_drops_other_elements():
    layer, x = Dropout(0.5, seed=3), Tensor(np.ones((4, 16)))
    masks = [layer(x).data for _ in range(3)]
    assert not any(np.array_equal(one, two) for one, two in combinations(masks, 2))
    with rng.at(step=5, row=0):
        inside = [layer(x).data for _ in range(2)]
    np.testing.assert_array_equal(*inside)
    layer.eval()
    layer(x)
    layer.train()
    other = Dropout(0.5)(x).data, Dropout(0.5)(x).data
    assert not np.array_equal(*other)


def test_calls_are_counted_from_a_place_again():
    layer, x = Dropout(0.5, seed=3), Tensor(np.ones((4, 16)))
    place = rng.place()
    masks = [layer(x).data for _ in range(2)]
    with rng.at(step=5, row=0):
        layer(x)
    with rng.back_at(place):
        for mask in masks:
            np.testing.assert_array_equal(layer(x).data, mask)
    after = layer(x).data
    assert not any(np.array_equal(after, mask) for mask in masks)


@pytest.mark.parametrize("nested", [False, True])
def test_recomputed_dropout_draws_the_same_masks(nested):
    """The gradient of a sum of masks is the masks; others are drawn before backward."""
    one, two, x = Dropout(0.5), Dropout(0.5), Tensor(np.ones((4, 16)), requires_grad=True)

    def part(t):
        return two(recompute(one, t) if nested else one(t))

    y = recompute(part, x)
    z = recompute(part, x)
    one(x)
    (y + z).sum().backward()
    np.testing.assert_array_equal(x.grad, y.data + z.data)
    assert not np.array_equal(y.data, z.data)


def test_the_index_of_dropout_is_unique():
    index = row_index((3, 4, 5), row=7)
    assert len(np.unique(index)) == index.size
    assert index[0, 0, 0] == 7 << 40


def test_the_gradient_of_dropout_passes_where_the_value_does():
    layer = Dropout(0.5, seed=3, name="d")
    x = Tensor(np.ones((2, 3, 4)), requires_grad=True)
    y = layer(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.data)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Linear(0, 3), "in_features"),
        (lambda: Linear(3, -1), "out_features"),
        (lambda: Embedding(0, 3), "num"),
        (lambda: Embedding(3, 0), "dim"),
        (lambda: LayerNorm(0), "dim"),
        (lambda: RMSNorm(0), "dim"),
        (lambda: Dropout(1.0), "p"),
        (lambda: Dropout(-0.1), "p"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, name):
    with pytest.raises(ConfigError, match=f"^{name}="):
        make()
