"""`mpipar bench train`: what it refuses and writes, and that its peer trains the same model."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpipar import models
from mpipar.bench import torch_gpt
from mpipar.bench.train import paired
from mpipar.bench.train_peer import Peer
from mpipar.bench.train_settings import Train, check, operations
from mpipar.errors import ConfigError
from tests.launch import launch

pytestmark = pytest.mark.launch

NO_TORCH = importlib.util.find_spec("torch") is None
TINY = ("--layers", "1", "--dim", "32", "--heads", "2", "--seq", "16", "--batch", "2")
SHORT = ("--steps", "2", "--repeats", "2")
BENCH = ("-m", "mpipar.cli.main", "bench", "train", *TINY, *SHORT)
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"heads": 3}, ["heads=3", "divide dim=256", "2, 4"]),
    ({"layers": 0}, ["layers=0", "at least 1"]),
    ({"batch": 0}, ["batch=0", "at least 1"]),
    ({"steps": -1}, ["steps=-1", "at least 1"]),
    ({"repeats": 0}, ["repeats=0"]),
    ({"threads": 0}, ["threads=0"]),
    ({"seed": -1}, ["seed=-1", "negative"]),
    ({"modes": ()}, ["modes=()", "at least"]),
    ({"modes": ("ddp", "ddp")}, ["modes=('ddp', 'ddp')", "once"]),
]
ROW = {
    *("mode", "ranks", "dim", "tokens_per_s", "peer_tokens_per_s", "ratio", "mfu"),
    *("rss_mb", "peer_rss_mb", "rss_ratio", "single_tokens_per_s", "overhead", "peer_mfu"),
    *("matmul_gflops", "step_s", "peer_step_s", "single_step_s"),
    *("layers", "heads", "seq", "batch", "vocab", "threads"),
}


@pytest.mark.parametrize(("settings", "words"), BAD, ids=lambda value: str(value)[:40])
def test_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Train(**settings))
    for word in words:
        assert word in str(caught.value)


def test_torch_is_asked_for_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torch"):
        check(Train(peer="torch"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rows(ranks: int, tmp_path: Path) -> None:
    result = launch(ranks, [*BENCH, "--json", tmp_path / "x.json"], timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"ddp, {ranks} rank" in result.stdout
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    for row, mode in zip(rows, ("ddp", "fsdp"), strict=True):
        assert set(row) == ROW
        assert (row["mode"], row["ranks"], row["dim"]) == (mode, ranks, 32)
        assert row["tokens_per_s"] == pytest.approx(ranks * 2 * 16 / row["step_s"])
        assert row["overhead"] > -1
        assert row["ratio"] is row["peer_tokens_per_s"] is row["peer_rss_mb"] is None
        assert 0 < row["mfu"] < 1
        assert row["rss_mb"] > 10


def test_ratios_are_those_of_the_turns() -> None:
    """A turn in which the machine is slow moves both sides, and no ratio."""
    assert paired([1.0, 9.0, 2.0], [1.0, 3.0, 4.0]) == 1.0


def test_a_mistake_is_one_line_of_the_job() -> None:
    result = launch(2, [*BENCH, "--json", "/nowhere/x.json"], timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("mpipar: error: json=") == 1
    assert "Traceback" not in result.stderr


def test_the_products_are_those_of_a_step() -> None:
    """Their operations, each as often as it occurs, are 6 N a token without attention."""
    config = Train(layers=1, dim=64, vocab=96, seq=32, batch=3)
    model = models.build(config.model())
    weights = sum(p.data.size for p in model.parameters() if p.data.ndim == 2)
    weights -= 32 * 64  # positions are only looked up
    assert sum(map(operations, config.products())) == 6.0 * weights * config.tokens


def test_a_peer_that_fails_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "peer.py"
    script.write_text("import sys\nsys.exit('no such luck')\n")
    monkeypatch.setattr(torch_gpt, "__file__", str(script))
    with Peer({"threads": 1}) as peer, pytest.raises(ConfigError, match="ended: no such luck"):
        peer.parameters()


def test_a_peer_that_is_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(torch_gpt, "__file__", str(script))
    monkeypatch.setattr(sys.modules[Peer.__module__], "SECONDS", 0.2)
    with Peer({"threads": 1}) as peer, pytest.raises(ConfigError, match=r"no answer in 0\.2 s"):
        peer.parameters()


@pytest.mark.skipif(NO_TORCH, reason="torch is not installed")
def test_the_peer_has_as_many_parameters() -> None:
    config = Train(layers=2, dim=32, heads=2, seq=16, vocab=40)
    settings = {name: getattr(config, name) for name in ("layers", "dim", "heads", "seq", "vocab")}
    ours = sum(p.data.size for p in models.build(config.model()).parameters())
    assert torch_gpt.count(torch_gpt.build(settings)) == ours
