"""Imports go down only, and nobody reaches into what another module keeps for itself.

L0  errors  partition  arrays  rng  trace
L1  kernels  schedule
L2  comm  autograd                          comm and autograd do not know each other
    functional                              the names of autograd's operations for users
L3  nn  optim  models
L4  parallel                                the first layer that joins communication and gradients
L5  train  checkpoint  huggingface  bench  doctor  plan  cli  __main__
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repo.sources import ROOT, name_of, python_files, tree_of

L0 = {"errors", "partition", "arrays", "rng", "trace"}
L2_AND_BELOW = L0 | {"kernels", "schedule", "comm", "autograd"}
L4_AND_BELOW = L2_AND_BELOW | {"nn", "optim", "models", "parallel"}

# which parts of mpipar each part may import, besides itself
ALLOWED = {
    "errors": set(),
    "partition": {"errors"},
    "arrays": {"errors"},
    "rng": {"errors", "arrays"},
    "trace": {"errors"},
    "kernels": L0,
    "schedule": L0,
    "comm": L0 | {"kernels", "schedule"},
    "autograd": L0 | {"kernels"},
    "functional": {"autograd"},
    "nn": L0 | {"kernels", "autograd"},
    "optim": L0 | {"kernels", "autograd", "nn"},
    "models": L0 | {"kernels", "autograd", "nn"},
    "parallel": L2_AND_BELOW | {"nn", "optim"},
    "train": L4_AND_BELOW | {"checkpoint", "huggingface"},
    "checkpoint": L4_AND_BELOW,
    "huggingface": L4_AND_BELOW | {"checkpoint"},
    "bench": L4_AND_BELOW | {"train", "checkpoint"},
    "doctor": L4_AND_BELOW | {"train"},
    "plan": L4_AND_BELOW | {"train"},
    "cli": L4_AND_BELOW | {"train", "checkpoint", "huggingface", "bench", "doctor", "plan"},
    "__main__": {"cli"},
}
KNOW_MPI = {"comm", "parallel", "train", "checkpoint", "huggingface", "bench", "doctor", "plan"}
KNOW_MPI |= {"cli"}
USE_NUMPY = {"replay", "simulate"}  # in schedule/; the rest of it is the standard library alone
# in parallel/: its other modules use these freely, and of each other only what users see
FOUNDATION = {"collective_matmul", "communicator", "differentiable", "mesh", "wrapped"}
NEVER = {"torch", "pickle", "tests"}

FILES = python_files("mpipar", "kernels")
MODULES = [path for path in FILES if path != ROOT / "mpipar/__init__.py" and path.suffix == ".py"]


class Import(NamedTuple):
    """One imported name: `from a.b import c` is module a.b, name c; `import a.b` has no name."""

    line: int
    module: str
    name: str


def imports(path: Path) -> Iterator[Import]:
    """Every import in a file, those inside functions too."""
    folders = path.relative_to(ROOT).parts[:-1]
    package = folders if folders[0] == "mpipar" else ("mpipar", *folders)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(node.lineno, module, alias.name)


def part_of(path: Path) -> str:
    """Return the part of mpipar that a file belongs to: nn, kernels, errors."""
    parts = path.relative_to(ROOT).parts
    return "kernels" if parts[0] == "kernels" else parts[1].removesuffix(".py")


def target(imported: Import) -> str | None:
    """Return the part that is imported, None for another library, "" for mpipar's public names."""
    top, *rest = imported.module.split(".")
    if top != "mpipar":
        return None
    return rest[0] if rest else imported.name if imported.name in ALLOWED else ""


def place(path: Path, one: Import) -> str:
    """Return where an import stands."""
    return f"{name_of(path)}:{one.line}"


def test_imports_go_down() -> None:
    wrong = []
    for path in MODULES:
        part = part_of(path)
        assert part in ALLOWED, f"{part} has no place among the layers: add it to ALLOWED"
        for one in imports(path):
            there = target(one)
            if there in {None, part, *ALLOWED[part]} or (there, one.name) == ("", "__version__"):
                continue
            wrong.append(f"{place(path, one)}: {part} must not import {one.module} {one.name}")
    assert not wrong, "\n".join(wrong)


def test_libraries_stay_where_they_belong() -> None:
    wrong = []
    for path in MODULES:
        part = part_of(path)
        for one in imports(path):
            library = one.module.split(".")[0]
            if library in NEVER:
                wrong.append(f"{place(path, one)}: {library} is not used here at all")
            if library == "mpi4py" and part not in KNOW_MPI:
                wrong.append(f"{place(path, one)}: {part} knows no MPI")
            known = library in {"mpipar", *sys.stdlib_module_names}
            known = known or (library == "numpy" and path.stem in USE_NUMPY)
            if part == "schedule" and not known:
                wrong.append(f"{place(path, one)}: schedule is the standard library alone")
    assert not wrong, "\n".join(wrong)


def test_private_names_are_not_imported() -> None:
    wrong = [
        f"{place(path, one)}: {one.name} is private to {one.module}"
        for path in MODULES
        for one in imports(path)
        if one.module.startswith("mpipar")
        if one.name.startswith("_") and not one.name.startswith("__")
    ]
    assert not wrong, "\n".join(wrong)


def test_parallel_modules_meet_by_public_names() -> None:
    stub = ROOT / "mpipar/__init__.pyi"
    public = {one.name for one in imports(stub)}
    wrong = []
    for path in MODULES:
        for one in imports(path):
            _, part, sibling, *_ = [*one.module.split("."), "", "", ""]
            if part_of(path) != "parallel" or part != "parallel":
                continue
            own_folder = sibling in path.parts
            if path.stem in FOUNDATION or sibling in FOUNDATION or own_folder:
                continue
            if path.name != "__init__.py" and one.name not in public:
                wrong.append(f"{place(path, one)}: {sibling}.{one.name} is not public")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_dead_entries() -> None:
    parts = {part_of(path) for path in MODULES}
    assert set(ALLOWED) <= parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import mpipar.comm.run", "comm"),
        ("from mpipar.nn.spec import Spec", "nn"),
        ("from mpipar import rng", "rng"),
        ("from mpipar import Tensor", ""),
        ("from . import plan", "comm"),
        ("from ..errors import ConfigError", "errors"),
        ("def f():\n    from mpipar.parallel.mesh import Mesh", "parallel"),
        ("import numpy as np", None),
    ],
)
def test_how_imports_are_read(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "tree_of", lambda _: ast.parse(text))
    assert [target(one) for one in imports(ROOT / "mpipar/comm/run.py")] == [expected]
