"""Rules of form that no linter here knows."""

import ast
import re
import subprocess
from pathlib import Path

from tests.repo.sources import ROOT, name_of, python_files, tree_of

OURS = python_files("mpipar", "kernels", "tests")
SHIPPED = python_files("mpipar", "kernels")
LONGEST_FILE = 400  # lines
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
ABSTRACT = "NotImplementedError"
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|opt|Users|farm|tmp/[a-z])\b")


def tracked() -> list[Path]:
    """Return the files that git knows, or would take; all files where this is no git checkout."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return OURS
    return [path for name in done.stdout.split("\n") if (path := ROOT / name).is_file()]


def test_a_file_holds_one_idea() -> None:
    lengths = {name_of(path): path.read_text().count("\n") for path in OURS}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}


def test_nothing_is_left_unfinished() -> None:
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SHIPPED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_methods_for_subclasses_are_not_implemented() -> None:
    """`raise NotImplementedError` is all that such a method does, below what it says of itself."""
    wrong = []
    for path in SHIPPED:
        used = [node for node in ast.walk(tree_of(path)) if getattr(node, "id", "") == ABSTRACT]
        methods = [
            method
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, ast.FunctionDef) and len(method.body) == 2
            if ast.get_docstring(method) and isinstance(method.body[1], ast.Raise)
        ]
        right = {id(node) for method in methods for node in ast.walk(method.body[1])}
        wrong += [f"{name_of(path)}:{node.lineno}" for node in used if id(node) not in right]
    assert not wrong, "\n".join(wrong)


def test_no_path_of_one_machine() -> None:
    own = Path(__file__)
    texts = [
        path for path in tracked() if path.suffix in (".py", ".pyi", ".md", ".toml", ".sh", "")
    ]
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in texts
        if path != own and path.name != "LICENSE"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_pickle_in_what_is_shipped() -> None:
    """Lower-case methods of mpi4py pickle; array data goes through the upper-case ones."""
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SHIPPED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "allow_pickle=True" in line or re.search(r"\bpickle\.(loads?|dumps?)\b", line)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_folders_at_the_top() -> None:
    known = {"mpipar", "kernels", "tests", "slurm", ".ci"}
    known |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"}
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= known


def test_kernels_are_linked_into_the_package() -> None:
    link = ROOT / "mpipar" / "kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("../kernels")
