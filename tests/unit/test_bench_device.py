"""`mpipar bench kernels --device cuda` on the stand-in for CuPy, from end to end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpipar.bench import kernel_cases
from mpipar.cli import kernels
from mpipar.errors import ConfigError
from mpipar.kernels import device_cache
from tests import fake_cupy

SMALL = kernel_cases.Sizes(24, 16, 12, (1, 8, 2, 4), 8, 64)


def test_every_kernel_has_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cupy.install(monkeypatch)
    compiled: list[str] = []
    monkeypatch.setattr(device_cache, "compile_cuda", compiled.append)
    monkeypatch.setattr(kernel_cases, "DEVICE", SMALL)
    path = tmp_path / "x.json"
    assert kernels.run((), 1e-6, path, "cuda") == 0
    assert compiled == ["90"]
    told: dict[str, Any] = json.loads(path.read_text())
    assert {"copy_bytes_per_s", "product_flops_float32", "product_flops_bfloat16"} == {
        *told["machine"]
    }
    rows = told["rows"]
    cases = kernel_cases.cases(SMALL)
    pairs = [(case.kernel, name) for case in cases for name in ("float32", "bfloat16")]
    assert [(row["kernel"], row["dtype"]) for row in rows] == pairs
    for row in rows:
        assert row["device"] == "cuda"
        floors = row["bytes_floor_s"], row["operations_floor_s"]
        assert row["ratio"] == pytest.approx(row["median_s"] / max(floors))
        if row["plain_s"] is not None:
            assert row["of_plain"] == pytest.approx(row["plain_s"] / row["median_s"])
    beside = {(row["kernel"], row["dtype"]) for row in rows if row["plain_s"] is not None}
    assert {("matmul", "bfloat16"), ("transpose", "bfloat16"), ("softmax", "float32")} <= beside
    shown = capsys.readouterr().out
    assert all(case.kernel in shown for case in cases)
    with pytest.raises(ConfigError, match="nosuch"):
        kernels.run(("nosuch",), 1.0, None, "cuda")


def test_without_cupy_the_error_says_what_to_install() -> None:
    if "cupy" in sys.modules:
        pytest.skip("CuPy is installed here")
    with pytest.raises(ConfigError, match="cuda13"):
        kernels.run((), 1.0, None, "cuda")
