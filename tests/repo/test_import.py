"""`import mpipar` is cheap: it starts neither MPI nor CUDA and loads no heavy library."""

import json
import sys

import pytest

from tests.launch import run

HEAVY = ("mpi4py.MPI", "cupy", "numba", "llvmlite", "rich", "tyro", "matplotlib", "safetensors")

COMPILERS = [f"mpipar.kernels.{name}" for name in ("device_build", "device_types", "ptx_build")]

LOADED = "import sys, json{statement}; print(json.dumps(sorted(sys.modules)))"


def loaded_by(statement: str) -> set[str]:
    done = run([sys.executable, "-c", LOADED.format(statement=statement)])
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_import_loads_no_heavy_library() -> None:
    modules = loaded_by(", mpipar")
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("part", ["schedule", "autograd", "nn", "optim", "models", "kernels"])
def test_parts_below_communication_start_no_mpi(part: str) -> None:
    modules = loaded_by(f", mpipar.{part}")
    assert not modules & {"mpi4py.MPI", "cupy", "matplotlib", "rich", "tyro"}


def test_functional_is_a_module_of_its_own() -> None:
    code = (
        "import sys, mpipar.functional as F, mpipar as mp; assert mp.functional is F; "
        "assert set(F.__all__) <= set(dir(F)); assert F.relu is mp.autograd.functional.relu; "
        "print('mpi4py.MPI' in sys.modules)"
    )
    done = run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_every_module_can_be_imported_and_none_runs_a_command() -> None:
    code = (  # the compilers of CUDA kernels need numba-cuda
        "import pkgutil, importlib.util, mpi4py, mpipar; mpi4py.rc.initialize = False; "
        "found = pkgutil.walk_packages(mpipar.__path__, 'mpipar.'); "
        f"out = {COMPILERS} if importlib.util.find_spec('numba_cuda') is None else []; "
        "names = [one.name for one in found if one.name not in out]; "
        "print(sum(importlib.import_module(name) is not None for name in names))"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_every_public_name_can_be_loaded() -> None:
    code = "import mpipar; print(len([getattr(mpipar, name) for name in mpipar.__all__]))"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
