"""`mpipar bench`: what cannot be measured or written is one line, before anything is measured."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpipar.bench.checkpoint import check_room
from mpipar.bench.kernel_cases import Case, cases
from mpipar.cli.bench import Collectives, check
from mpipar.errors import ConfigError
from tests.launch import launch, run

pytestmark = pytest.mark.launch

BENCH = ["-m", "mpipar.cli.main", "bench"]
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"sizes": (-4,)}, ["sizes=-4", "at least 4"]),
    ({"sizes": (0,)}, ["sizes=0", "at least 4"]),
    ({"sizes": (4, 7)}, ["sizes=7", "multiple of 4", "Pass 4"]),
    ({"sizes": (10**13,)}, ["sizes=10000000000000", "60 TB", "this machine has"]),
    ({"sizes": ()}, ["sizes=()"]),
    ({"names": ()}, ["names=()"]),
    ({"algorithms": ("nosuch",)}, ["algorithms='nosuch'", "auto, ", "window"]),
    ({"names": ("broadcast",), "algorithms": ("window",)}, ["algorithms='window'", "broadcast"]),
    ({"json": Path("/nowhere/x.json")}, ["json='/nowhere/x.json'", "no folder /nowhere"]),
    ({"tune": True}, ["MPIPAR_TUNING", "cannot be written"]),
]


@pytest.mark.parametrize(("settings", "words"), BAD, ids=lambda value: str(value)[:40])
def test_refused(
    settings: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIPAR_TUNING", "/dev/null/tuning.json")
    with pytest.raises(ConfigError) as caught:
        check(Collectives(**settings), rank=0, ranks=2, local=2)
    for word in words:
        assert word in str(caught.value)


def test_a_mistake_is_one_line_of_the_job(tmp_path: Path) -> None:
    result = launch(2, [*BENCH, "collectives", "--json", tmp_path / "none" / "x"], timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("mpipar: error: json=") == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("what", ["collectives", "pipeline"])
def test_messages_need_peers(what: str) -> None:
    result = run([sys.executable, *BENCH, what], timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.rstrip().endswith(f"Start mpiexec -n 2 mpipar bench {what}")


def test_a_short_measurement_is_written(tmp_path: Path) -> None:
    flags = ["--sizes", "64", "--algorithms", "ring", "--json", tmp_path / "x.json", "--tune"]
    env = {"MPIPAR_TUNING": str(tmp_path / "cache" / "tuning.json")}
    result = launch(2, [*BENCH, "collectives", *flags], timeout=60, env=env)
    assert result.returncode == 0, result.stderr
    assert "all_reduce, 64 bytes, 2 ranks" in result.stdout
    assert (tmp_path / "x.json").exists()
    assert (tmp_path / "cache" / "tuning.json").exists()


def test_a_checkpoint_is_timed_and_deleted(tmp_path: Path) -> None:
    flags = ["--size", "256KiB", "--repeats", "1", "--dir", tmp_path, "--json", tmp_path / "x.json"]
    result = launch(2, [*BENCH, "checkpoint", *flags], timeout=60)
    assert result.returncode == 0, result.stderr
    assert "2 ranks, cut by columns" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    for row, cut in zip(
        json.loads((tmp_path / "x.json").read_text())["rows"], ("rows", "columns"), strict=True
    ):
        assert (row["cut"], row["ranks"], row["bytes"]) == (cut, 2, 1 << 18)
        assert row["write_ratio"] == pytest.approx(row["plain_write_s"] / row["write_s"])
        assert row["read_s"] > 0
    with pytest.raises(ConfigError, match=r"dir='.*none'"):
        check_room(tmp_path / "none", 1)


def test_overhead_checks_its_file_first() -> None:
    result = run([sys.executable, *BENCH, "overhead", "--json", "/nowhere/y"], timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert "json='/nowhere/y'" in result.stderr


def test_kernels_are_timed_beside_their_floors(tmp_path: Path) -> None:
    flags = ["--names", "gelu", "attention", "--seconds", "0.01", "--json", tmp_path / "x.json"]
    done = run([sys.executable, *BENCH, "kernels", *flags], timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["kernel"], row["device"], row["dtype"]) for row in rows] == [
        ("gelu", "cpu", "float32"), ("attention", "cpu", "float32"),
    ]  # fmt: skip
    for row in rows:
        assert row["ratio"] == pytest.approx(row["median_s"] / row["floor_s"])
        assert row["kernel"] in done.stdout
    assert rows[1]["bound"] == "operations"
    done = run([sys.executable, *BENCH, "kernels", "--names", "nosuch"], timeout=60)
    assert done.returncode == 2
    assert "names='nosuch'" in done.stderr


def test_compiling_for_a_gpu_needs_its_compiler() -> None:
    if importlib.util.find_spec("numba_cuda") is not None:
        pytest.skip("numba-cuda is installed: tests/cuda/test_compiled.py compiles")
    done = run([sys.executable, *BENCH, "kernels", "--compile-only"], timeout=60)
    assert done.returncode == 2
    assert "it needs numba-cuda" in done.stderr
    done = run([sys.executable, *BENCH, "kernels", "--compile-only", "--names", "x"], timeout=60)
    assert "names='x'" in done.stderr


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.kernel)
def test_what_a_kernel_is_timed_with(case: Case) -> None:
    inputs = case.arrays()
    floats = sum(x.nbytes for x in inputs if x.dtype.kind == "f")
    assert floats <= case.bytes() or case.kernel.startswith("attention")
    assert case.call(*inputs) is not False
