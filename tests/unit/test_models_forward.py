"""The models against a second, plain NumPy statement of what they compute."""

from functools import partial

import numpy as np
import pytest

from mpipar import rng
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build
from mpipar.nn import Linear

TINY = partial(ModelConfig, vocab=11, layers=2, dim=16, heads=4, seq=8, seed=3, dtype="float64")
CONFIGS = {
    "gpt2": TINY(),
    "gpt2-untied": TINY(tied=False),
    "gpt2-grouped": TINY(kv_heads=2),
    "llama": TINY(model="llama", kv_heads=2),
    "llama-tied": TINY(model="llama", tied=True),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def batch(rows=3, seq=8, vocab=11, seed=0):
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, seq + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def norm(x, w, name):
    if f"{name}.bias" in w:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def affine(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def turn(x, base=10000.0):
    """Multiply pairs (i, i + D/2) of x [B, S, H, D] by exp(i * position * base**(-2i/D))."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def attend(x, w, name, config):
    heads, kv, width = config.heads, config.kv_heads, config.head_dim
    fused = affine(x, w, f"{name}.qkv").reshape(*x.shape[:2], -1, width)
    q, k, v = np.split(fused, [heads, heads + kv], axis=2)
    if config.model == "llama":
        q, k = turn(q), turn(k)
    k, v = (np.repeat(t, heads // kv, axis=2) for t in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(width)
    scores[..., ~np.tri(x.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhst,bthd->bshd", weights, v).reshape(*x.shape[:2], -1)
    return affine(out, w, f"{name}.projection")


def feed(x, w, name):
    if f"{name}.up.weight" in w:
        h = affine(x, w, f"{name}.up")
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    else:
        gate, up = np.split(affine(x, w, f"{name}.gate_up"), 2, axis=-1)
        h = gate / (1 + np.exp(-gate)) * up
    return affine(h, w, f"{name}.down")


def reference(tokens, w, config):
    x = w["token_embedding.weight"][tokens]
    if config.model == "gpt2":
        x = x + w["position_embedding.weight"][: tokens.shape[1]]
    for index in range(config.layers):
        name = f"blocks.{index}"
        x = x + attend(norm(x, w, f"{name}.norm1"), w, f"{name}.attention", config)
        x = x + feed(norm(x, w, f"{name}.norm2"), w, f"{name}.mlp")
    return norm(x, w, "norm") @ w.get("head.weight", w["token_embedding.weight"]).T


@each
def test_logits_and_loss(config):
    model = build(config)
    for number, array in enumerate(model.state_dict().values()):  # away from zeros and ones
        array += 0.3 * np.random.default_rng(number).standard_normal(array.shape)
    tokens, targets = batch()
    expected = reference(tokens, model.state_dict(), config)
    np.testing.assert_allclose(model(tokens).data, expected, rtol=1e-10, atol=1e-11)

    targets[0, :3] = -100
    log_sum = np.log(np.exp(expected).sum(-1))
    losses = log_sum - np.take_along_axis(expected, targets.clip(0)[..., None], -1)[..., 0]
    total, count = model.loss(tokens, targets)
    assert count == 21
    np.testing.assert_allclose(total.item(), losses[targets >= 0].sum(), rtol=1e-11)


@each
def test_names_are_the_global_names(config):
    model = build(config)
    for name, parameter in model.named_parameters():
        assert parameter.spec.name == name
        assert parameter.spec.shape == parameter.shape
    assert "blocks.0.attention.qkv.weight" in model.state_dict()


@each
def test_the_loss_starts_at_that_of_guessing(config):
    total, count = build(config).loss(*batch())
    assert abs(total.item() / count - np.log(11)) < 0.1


@each
def test_losses_of_parts_of_a_batch_add_up(config):
    model = build(config)
    tokens, targets = batch()
    targets[1, 2:] = -100
    whole, count = model.loss(tokens, targets)
    parts = [model.loss(tokens[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 3))]
    assert count == sum(n for _, n in parts)
    np.testing.assert_allclose(sum(t.item() for t, _ in parts), whole.item(), rtol=1e-13)


@each
def test_a_part_of_the_sequence_has_its_global_positions(config):
    """With attention that sends no information between tokens, parts equal slices of the whole."""
    config = TINY(model=config.model, dropout=0.3)
    model = build(config, attention=lambda q, k, v: q * k + v)
    tokens, _ = batch()
    there = np.array([6, 7, 0, 1])
    with rng.at(step=4, row=0):
        whole = model(tokens).data
        part = model(tokens[:, there], positions=there).data
    np.testing.assert_allclose(part, whole[:, there], rtol=1e-12, atol=1e-14)
    with rng.at(step=4, row=2):
        np.testing.assert_allclose(model(tokens[2:]).data, whole[2:], rtol=1e-12, atol=1e-14)
    with rng.at(step=5, row=0):
        assert not np.allclose(model(tokens).data, whole)
    model.eval()
    np.testing.assert_array_equal(model(tokens).data, model(tokens).data)


class LocalLinear(Linear):
    """One rank's share of a Linear: rows for "column", columns for "row", without communication."""

    def __init__(self, rank, ranks, role, n, m, *, parts=None, **how):
        super().__init__(n, m, **how)
        spec = self.weight.spec.shard("tp", 0 if role == "column" else 1, rank, ranks, parts)
        self.weight.data = spec.take(self.weight.data).copy()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("half", ["attention", "mlp"])
def test_shares_of_a_column_and_a_row_layer_add_up(kv_heads, half):
    config = TINY(model="llama", kv_heads=kv_heads)
    x = build(config).embed(batch()[0], np.arange(8))

    def output(model):
        block = model.blocks[1]
        return block.mlp(x) if half == "mlp" else block.attention(x, np.arange(8))

    shares = [output(build(config, linear=partial(LocalLinear, r, 2))) for r in range(2)]
    whole = output(build(config)).data
    np.testing.assert_allclose(shares[0].data + shares[1].data, whole, rtol=1e-11, atol=1e-16)


def test_heads_that_do_not_split_are_refused():
    model = build(TINY(kv_heads=1), linear=lambda role, n, m, **how: cut_column(role, n, m, **how))
    with pytest.raises(ConfigError, match=r"kv_heads=1: .*divides kv_heads"):
        model(batch()[0])


def cut_column(role, n, m, *, parts=None, **how):
    return Linear(n, m // 2 if role == "column" else m, **how)


def test_a_token_outside_the_vocabulary_is_named():
    model = build(CONFIGS["gpt2"])
    tokens, targets = batch()
    tokens[1, 4] = 11
    with pytest.raises(ConfigError, match=r"tokens\[1, 4\]=11: it must be in the vocabulary of 11"):
        model(tokens)
    targets[2, 0] = -3
    with pytest.raises(ConfigError, match=r"targets\[2, 0\]=-3"):
        model.loss(targets, targets)


def test_learned_positions_end_at_the_context():
    tokens, _ = batch(seq=9)
    with pytest.raises(ConfigError, match=r"positions=8: .*seq=8"):
        build(CONFIGS["gpt2"])(tokens)
    assert build(CONFIGS["llama"])(tokens).shape == (3, 9, 11)


def test_the_cost_of_a_token():
    config = ModelConfig(vocab=50, layers=2, dim=8, heads=2, seq=16, dtype="float64")
    block = 24 * 8 + 24 + 8 * 8 + 8 + 2 * (32 * 8) + 32 + 8 + 4 * 8
    assert build(config).flops_per_token(16) == 6 * (2 * block + 2 * 8 + 50 * 8) + 6 * 2 * 16 * 8
    untied = ModelConfig(vocab=50, layers=2, dim=8, heads=2, seq=16, tied=False)
    assert build(untied).flops_per_token(16) == build(config).flops_per_token(16)
    grouped = ModelConfig("llama", 50, 2, 8, 2, 1, seq=16, hidden=20)
    block = 16 * 8 + 8 * 8 + 3 * 20 * 8 + 2 * 8
    assert build(grouped).flops_per_token(4) == 6 * (2 * block + 8 + 50 * 8) + 6 * 2 * 4 * 8
