"""The source files of the project as the repository tests look at them."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below these folders of the repository, links left out, sorted."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py*")):
            parts = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".pyi") and parts[:2] != ("mpipar", "kernels"):
                found.append(path)
    return found


def name_of(path: Path) -> str:
    """Return the path relative to the repository, for ids and messages."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))
