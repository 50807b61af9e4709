"""Every program and command of README.md runs, and prints what the README shows."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.launch import ROOT, launch, mpiexec, run
from tests.readme import Block

BLOCKS = readme.blocks()
CODE = [block for block in BLOCKS if block.language in readme.CODE]
RUN = [block for block in CODE if block.kind == "run"]

# what lets the README's plain `mpiexec` start more ranks than cores, as root, under Open MPI
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def label(block: Block) -> str:
    return f"line {block.line}"


def running(language: str) -> list[Any]:
    """Return the blocks of a language that are run, as test parameters."""
    return [pytest.param(block, id=label(block)) for block in RUN if block.language == language]


def shown_after(block: Block) -> str | None:
    """Return the output that the README shows for a program, if it does."""
    following = BLOCKS[BLOCKS.index(block) + 1 :]
    return following[0].text if following and following[0].kind == "output" else None


def test_every_program_says_how_it_is_checked() -> None:
    assert [label(block) for block in CODE if block.kind not in ("run", "ci")] == []
    assert all(block.language in ("python", "console") for block in RUN)


def test_the_lines_that_ci_runs() -> None:
    test, train = readme.named("test"), readme.named("train")
    assert "pytest" in test
    assert "mpiexec -n 4" in test
    assert train.endswith("mpipar train")  # .ci/run adds the number of steps


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which `mpiexec`, `python` and `mpipar` are those of this environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    start = "from mpipar.cli.main import main; raise SystemExit(main())"
    programs = {
        "mpipar": f'{sys.executable} -c "{start}"',
        "mpiexec": mpiexec()[0],
        "python": sys.executable,
    }
    for name, command in programs.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("block", running("python"))
def test_program(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.text)
    done = launch(int(block.options.get("ranks", 1)), [program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = shown_after(block)
    assert shown is None or done.stdout == shown


@pytest.mark.parametrize("block", running("console"))
def test_session(block: Block, tmp_path: Path, path: str) -> None:
    for command, shown in session(block.text):
        environment = {"PATH": path, "COLUMNS": "100", **OPEN_MPI}
        done = run(["bash", "-c", command], 280, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert not shown or done.stdout == shown


def session(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console session, each with the output shown below it."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert parts[0] == "", "a session starts with `$ `"
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts[1:]]


def test_files_and_links_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    names = re.findall(r"`((?:mpipar|kernels|tests|slurm)/[\w/.-]+)`", text)
    assert [name for name in links + names if not (ROOT / name).exists()] == []


def test_how_blocks_are_read() -> None:
    text = (
        "# a\n\n<!-- run ranks=3 -->\n```python\nprint(1)\n```\n\nIt prints\n\n"
        "<!-- output -->\n```text\n1\n```\n\n```\nplain\n```\n"
    )
    program, output, plain = readme.blocks(text)
    assert (program.kind, program.language, program.options) == ("run", "python", {"ranks": "3"})
    assert (output.kind, output.text, plain.kind) == ("output", "1\n", "")
    assert session("$ a b\n1\n2\n$ c\n") == [("a b", "1\n2\n"), ("c", "")]
