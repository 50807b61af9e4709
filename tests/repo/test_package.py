"""What is shipped is complete: the wheel, the source archive, and an editable install."""

import email
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import mpipar
from tests.launch import run
from tests.repo.sources import ROOT, name_of, python_files

pytestmark = pytest.mark.time_limit(180)

BUILD = "import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"


def build(hook: str, source: Path, target: Path) -> Path:
    """Call a build hook, as pip does, in a folder; return the archive that it made."""
    target.mkdir(exist_ok=True)
    code = BUILD.format(hook=hook)
    done = run([sys.executable, "-W", "ignore", "-c", code, target], 150, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, since a build leaves files behind."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("mpipar", "kernels"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def shipped() -> set[str]:
    """Return the names that all source files have inside the package."""
    names = {name_of(path) for path in python_files("mpipar", "kernels")}
    return {f"mpipar/{name}" if name.startswith("kernels/") else name for name in names}


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith((".py", ".pyi"))} == shipped()
    assert {"mpipar/py.typed", "mpipar/__init__.pyi", "mpipar/kernels/__init__.py"} <= names
    assert wheel.name.endswith("-py3-none-any.whl")


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    said = email.message_from_bytes(archive.read(info))
    assert (said["Name"], said["Version"]) == ("mpipar", mpipar.__version__)
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    extras = {"mpich", "openmpi", "cuda12", "cuda13", "compile-cuda", "plot", "tokenizers"}
    extras |= {"mkl", "test", "dev"}
    assert set(said.get_all("Provides-Extra", [])) == extras
    folder = info.rpartition("/")[0]
    assert b"mpipar = mpipar.cli.main:main" in archive.read(f"{folder}/entry_points.txt")
    assert b"Apache License" in archive.read(f"{folder}/licenses/LICENSE")


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import mpipar, mpipar.kernels, pathlib; names = mpipar.__all__; "
        "[getattr(mpipar, name) for name in names]; print(pathlib.Path(mpipar.__file__).parent)"
    )
    done = run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "mpipar"


def test_the_source_archive_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    archive = build("build_sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    again = build(
        "build_wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "again"
    )
    names, twice = (sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, again))
    assert names == twice


def test_an_editable_install_reads_the_kernels_too(source: Path, tmp_path: Path) -> None:
    built = build("build_editable", source, tmp_path / "editable")
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    code = (  # -S: without what is installed here, which may be an editable install too
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2]); "
        "import mpipar.kernels as kernels; print(kernels.__file__)"
    )
    folders = [tmp_path / "site", sysconfig.get_path("purelib")]
    done = run([sys.executable, "-S", "-c", code, *folders], cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == source / "kernels" / "__init__.py"
