"""The memory that mpipar plan predicts is what a step of training takes."""

from typing import Any

import pytest

from mpipar.models.config import ModelConfig
from mpipar.plan import check
from mpipar.plan.layout import Job, Layout
from mpipar.plan.machine import Machine


@pytest.mark.parametrize("kind", ["dp", "fsdp", "tp"])
def test_memory_is_what_was_predicted(
    world: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "STEPS", 1)
    heads = 12  # for 1 to 4 ranks
    model = ModelConfig(layers=2, dim=192, heads=heads, vocab=384, seq=96)
    p = world.size
    layout = {"dp": Layout(dp=p), "fsdp": Layout(dp=p, fsdp=3 * (p > 1)), "tp": Layout(tp=p)}[kind]
    found = {row.name: row for row in check.check(Job(model, 12), layout, world, Machine())}
    assert 0.85 < found["bytes at the peak"].ratio < 1.15  # small: 0.5 MB is not the arrays'
    assert found["seconds of a step"].measured > 0
