"""Every setting that cannot work is refused with its name, value, rule and fix."""

from dataclasses import replace
from typing import Any

import pytest

from mpipar.errors import ConfigError
from mpipar.train.config import TrainConfig
from mpipar.train.rules import nearest

BAD: list[tuple[int, dict[str, Any], list[str]]] = [
    # ranks, settings, words of the message
    (4, {"dp": 3}, ["dp=3", "3 x 1 = 3", "4", "Leave --dp out", "-n 3"]),
    (4, {"dp": 2, "tp": 4}, ["dp=2", "2 x 4 = 8", "-n 8"]),
    (4, {"tp": 3, "heads": 3, "dim": 12}, ["tp=3", "number of ranks, 4", "1, 2, 4"]),
    (4, {"tp": 0}, ["tp=0", "at least 1"]),
    (4, {"dp": 0}, ["dp=0", "at least 1"]),
    (4, {"batch": 3}, ["batch=3", "dp=4", "--batch 4"]),
    (3, {"batch": 8, "accumulate": 3}, ["accumulate=3", "--accumulate 2", "--batch 9"]),
    (3, {"tp": 3}, ["heads=4", "tp=3", "3 or 6"]),
    (4, {"tp": 4, "model": "llama", "kv_heads": 2}, ["kv_heads=2", "tp=4", "--kv-heads 4"]),
    (2, {"tp": 2, "hidden": 33}, ["hidden=33", "tp=2", "32 or 34"]),
    (3, {"tp": 3, "heads": 6, "dim": 96, "model": "llama"}, ["hidden=256", "tp=3", "255 or 258"]),
    (4, {"pp": 0}, ["pp=0", "at least 1"]),
    (4, {"pp": 3}, ["pp=3", "number of ranks, 4", "1, 2, 4"]),
    (4, {"pp": 2, "tp": 4}, ["pp=2", "pp x tp = 2 x 4 = 8", "-n 8"]),
    (4, {"dp": 2, "pp": 2, "cp": 2}, ["dp=2", "2 x 2 x 2 = 8"]),
    (2, {"pp": 2, "layers": 1}, ["layers=1", "2 stages", "--layers 2"]),
    (2, {"pp": 2, "layers": 3, "schedule": "zbv"}, ["layers=3", "4 stages"]),
    (2, {"pp": 2, "schedule": "fast"}, ["schedule='fast'", "1f1b"]),
    (2, {"pp": 2, "schedule": "none.csv"}, ["none.csv"]),
    (2, {"pp": 2, "microbatches": 9}, ["microbatches=9", "--microbatches 8", "--batch 9"]),
    (2, {"pp": 2, "accumulate": 2, "microbatches": 5}, ["microbatches=5", "--microbatches 4"]),
    (2, {"pp": 2, "chunks": 2}, ["chunks=2", "1f1b"]),
    (2, {"microbatches": 2}, ["microbatches=2", "--pp 2"]),
    (2, {"schedule": "zb1p"}, ["schedule='zb1p'", "--pp 2"]),
    (2, {"sequence_parallel": True}, ["sequence_parallel=True", "--tp 2"]),
    (4, {"cp": 4, "seq": 7}, ["seq=7", "--seq 8"]),
    (8, {"cp": 8, "cp_layout": "ulysses"}, ["heads=4", "8 ranks", "zigzag"]),
    (1, {"experts": 2, "top_k": 3}, ["top_k=3", "experts=2", "--top-k 2"]),
    (1, {"top_k": 0}, ["top_k=0", "at least 1"]),
    (1, {"top_k": 2}, ["top_k=2", "only experts", "--experts 8"]),
    (2, {"cp_layout": "zigzag"}, ["cp_layout='zigzag'", "--cp 2"]),
    (2, {"cp_layout": "ulysses"}, ["cp_layout='ulysses'", "--cp 2"]),
    (1, {"experts": -1}, ["experts=-1"]),
    (4, {"experts": 8, "ep": 3}, ["ep=3", "dp x cp = 4 x 1 = 4", "1, 2, 4"]),
    (4, {"experts": 8, "ep": 4, "tp": 2}, ["ep=4", "2 x 1 = 2", "1, 2"]),
    (4, {"experts": 3, "ep": 4}, ["experts=3", "ep=4", "--experts 4"]),
    (2, {"experts": 4, "ep": 2, "fsdp": "2"}, ["fsdp='2'", "spread", "--ep 1"]),
    (2, {"ep": 2}, ["ep=2", "--experts 8"]),
    (1, {"shared": 8}, ["shared=8", "--experts 8"]),
    (2, {"experts": 4, "shared": 9, "tp": 2}, ["shared=9", "tp=2", "8 or 10"]),
    (1, {"balance": 0.01}, ["balance=0.01", "--experts 8"]),
    (1, {"capacity_factor": 1.0}, ["capacity_factor=1.0", "--experts 8"]),
    (1, {"capacity_factor": 0.0, "experts": 4}, ["capacity_factor=0.0", "above 0"]),
    (1, {"balance": -1.0}, ["balance=-1.0"]),
    (1, {"experts": 10**11}, ["experts=", "B on each rank", "--experts"]),
    (1, {"dim": 130}, ["dim=130", "heads=4", "128 or 132"]),
    (1, {"dim": 132, "model": "llama"}, ["dim=132", "128 or 136"]),
    (1, {"model": "llama", "kv_heads": 3}, ["kv_heads=3", "heads=4", "1, 2, 4"]),
    (1, {"kv_heads": 2}, ["kv_heads=2", "llama"]),
    (1, {"kv_heads": 0}, ["kv_heads=0"]),
    (1, {"heads": 0}, ["heads=0"]),
    (1, {"steps": 0}, ["steps=0"]),
    (1, {"lr": float("nan")}, ["lr=nan"]),
    (1, {"lr": 1e-3, "min_lr": 1e-2}, ["min_lr=0.01", "lr=0.001"]),
    (1, {"warmup": 301}, ["warmup=301", "steps=300"]),
    (1, {"dropout": 1.0}, ["dropout=1.0"]),
    (1, {"clip": -1.0}, ["clip=-1.0", "0 or more"]),
    (1, {"timeout": 0.0}, ["timeout=0.0", "--timeout 600"]),
    (1, {"seed": -1}, ["seed=-1"]),
    (1, {"device": "cuda"}, ["device='cuda'", "--device cpu"]),
    (1, {"log": "/nowhere/at/all.jsonl"}, ["log='/nowhere/at/all.jsonl'", "no folder /nowhere/at"]),
    (1, {"log": "/tmp"}, ["log='/tmp'", "folder"]),
    (1, {"vocab": 10**11}, ["vocab=100000000000", "B on each rank", "this machine has"]),
    (1, {"layers": 10**11}, ["layers=", "B on each rank", "--layers"]),
    (1, {"dim": 10**11}, ["dim=", "B on each rank", "--dim"]),
    (1, {"batch": 10**11, "accumulate": 10**11}, ["batch=", "B on each rank", "--batch"]),
    (1, {"sample": 10**11}, ["sample=", "B on each rank", "--sample"]),
    (1, {"plot": "loss.svg", "log": "./loss.svg"}, ["plot='loss.svg'", "another file"]),
    (1, {"log": __file__, "data": __file__}, ["log=", "part of data="]),
    (1, {"plot": "loss.txt"}, ["plot='loss.txt'", ".png"]),
]


@pytest.mark.parametrize(("ranks", "settings", "words"), BAD, ids=lambda value: str(value)[:40])
def test_refused(ranks: int, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TrainConfig(), **settings).validate(ranks)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_defaults_work_on_any_number_of_ranks(ranks: int) -> None:
    TrainConfig().validate(ranks)
    assert TrainConfig().copies(ranks) == ranks


def test_mesh_takes_what_is_left() -> None:
    assert TrainConfig(tp=2).copies(4) == 2
    TrainConfig(tp=2, dp=2).validate(4)
    TrainConfig(tp=2, model="llama", kv_heads=2).validate(2)


def test_a_few_steps_need_no_other_flags() -> None:
    for steps in range(1, 12):
        config = TrainConfig(steps=steps)
        config.validate(1)
        assert 0 <= config.warmup_steps <= steps


def test_matplotlib_is_asked_for_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"plot='a.png'.*matplotlib.*mpipar\[plot\]"):
        TrainConfig(plot="a.png").validate(1)


def test_fingerprint_is_of_all_settings() -> None:
    assert TrainConfig().fingerprint() == TrainConfig().fingerprint()
    assert TrainConfig().fingerprint() != TrainConfig(seed=1).fingerprint()


def test_nearest() -> None:
    assert nearest(7, 3) == "6 or 9"
    assert nearest(2, 3) == "3"
