"""The sizes of a model: what is filled in, and what is refused."""

import pytest

from mpipar.errors import ConfigError
from mpipar.models import ModelConfig


def test_what_is_left_out_is_filled_in():
    gpt2 = ModelConfig(dim=96, heads=6)
    assert (gpt2.kv_heads, gpt2.hidden, gpt2.tied, gpt2.head_dim) == (6, 384, True, 16)
    llama = ModelConfig(model="llama", dim=96, heads=6)
    assert (llama.kv_heads, llama.hidden, llama.tied) == (6, 256, False)
    assert ModelConfig(model="llama", dim=100, heads=5).hidden == 288  # 266.7, up to 32s
    assert ModelConfig(model="llama", tied=True).tied
    assert not ModelConfig(tied=False).tied


def test_weights_that_write_to_the_residual_stream_are_smaller():
    assert ModelConfig(layers=8).residual_std == pytest.approx(0.02 / 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": "rnn"}, "model='rnn'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"vocab": 0}, "vocab=0"),
        ({"layers": 0}, "layers=0"),
        ({"dim": -4}, "dim=-4"),
        ({"heads": 0}, "heads=0"),
        ({"seq": 0}, "seq=0"),
        ({"kv_heads": -1}, "kv_heads=-1"),
        ({"hidden": -1}, "hidden=-1"),
        ({"dim": 64, "heads": 7}, r"heads=7: heads must divide dim=64. Nearest that work: 4, 8"),
        ({"heads": 8, "kv_heads": 3}, r"kv_heads=3: .* Nearest that work: 2, 4"),
        ({"heads": 8, "kv_heads": 16}, r"kv_heads=16: .* Nearest that work: 8"),
        ({"model": "llama", "dim": 24, "heads": 8}, "dim / heads = 3, must be even"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_what_cannot_be_built_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**sizes)
