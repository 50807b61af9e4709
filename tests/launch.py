"""Starts real `mpiexec` jobs from a test, with MPICH or Open MPI, whichever this Python has.

    result = launch(2, ["-m", "mpipar.cli.main", "train", "--steps", "2"], timeout=60)
    assert result.returncode == 0, result.stderr

A test whose module imports `launch` runs on one rank of the suite only, apart from the other ones.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# what mpiexec puts into the environment of a rank; a child with these would take itself for a rank
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPIR_", "HYDRA_", "HYDI_", "MPI_")
# kept: settings of a user or of CI, not marks of a rank
SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_", "PMIX_MCA_", "HYDRA_LAUNCHER")

QUIET = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # as in tests/ranks/__init__.py
    "UCX_LOG_LEVEL": "fatal",
    "OMPI_MCA_btl_base_warn_component_unused": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def launch(
    n: int,
    args: Sequence[str | Path],
    timeout: float = 120.0,
    *,
    cwd: str | Path | None = None,
    env: MutableMapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` on `n` ranks and return the exit code with both outputs as text.

    The repository root is on PYTHONPATH. A job past `timeout` seconds is killed as a whole and
    raises subprocess.TimeoutExpired with what it had printed.
    """
    command = [*mpiexec(), *flags, "-n", str(n), sys.executable, *map(str, args)]
    return run(command, timeout, cwd=cwd, env=env)


def run(
    command: Sequence[str | Path],
    timeout: float = 120.0,
    *,
    cwd: str | Path | None = None,
    env: MutableMapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment that knows nothing of the MPI job which this test is in."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    full = {**clean_environment(), **QUIET, "PYTHONPATH": path, **(env or {})}
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=full,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the whole job can be killed
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        raise subprocess.TimeoutExpired(list(command), timeout, out, err) from None
    except BaseException:
        _kill(process)
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


@functools.cache
def mpiexec() -> tuple[str, ...]:
    """Return the mpiexec beside this Python, or on the PATH, with the flags that it needs here."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise FileNotFoundError("no mpiexec beside this Python or on the PATH: pip install mpich")
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, env=clean_environment(), check=False
    ).stdout
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        return (path, "--oversubscribe", "--allow-run-as-root")
    return (path,)


def clean_environment() -> dict[str, str]:
    """Return the environment without what an mpiexec has put into it."""
    return {name: value for name, value in os.environ.items() if not _is_launchers(name)}


@contextlib.contextmanager
def clean_environment_of(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Take what an mpiexec has put into an environment out of it for a while."""
    removed = {name: environment.pop(name) for name in list(environment) if _is_launchers(name)}
    try:
        yield
    finally:
        environment.update(removed)


def _is_launchers(name: str) -> bool:
    return name.startswith(LAUNCHER_PREFIXES) and not name.startswith(SETTINGS)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ask the job to end, so that mpiexec can end its ranks too, then make sure."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return
