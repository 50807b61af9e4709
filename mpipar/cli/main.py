"""The command `mpipar`: finds the subcommand, reads its flags, runs it, reports mistakes.

A subcommand is a module of this package with a frozen dataclass `Config` (or a union of some, for
subcommands of its own), `run(config) -> int`, the exit code, and `ALONE`, those configurations that
one process runs without MPI.  (`run` of `train` gets a function too, which reads the command again
with other defaults.)  tyro makes flags, help and checks
of types from the dataclass: the same typed class serves programs and the command line, and there is
no parser to keep in step with it.  Only the module that was asked for is imported.

Exit codes: 0 done, 1 what was checked is wrong, 2 a mistake in the command, a setting or a file.
"""

import io
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any

from mpipar.errors import MpiparError
from mpipar.train import launch, outputs

COMMANDS = {
    "train": "train a language model on text; start it with mpiexec",
    "bench": "measure collectives, training and overheads on this machine",
    "doctor": "check the machine and the job, or explain why one got stuck",
    "trace": "where the time of a traced training went, by rank",
    "schedule": "show, verify and simulate collective algorithms and pipelines",
    "generate": "let a trained model go on with a text",
    "convert": "Hugging Face folders of weights to checkpoints, and back",
    "plan": "which meshes a model fits on: memory, communication and time of a step",
}
HEAD_START = 0.5  # seconds for rank 0 to speak, before the launcher sees that another has ended
PATIENCE = 2.0  # seconds for all processes of a job to leave, before one ends it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mpipar` with these arguments (those of the process if None); return the exit code.

    A mistake of the user is one line on stderr and code 2.  In a job of several ranks an error is
    raised instead, for the abort hook to end the job; what all ranks see, a subcommand reports.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        outputs.silence_stdout()
        return 0
    except KeyboardInterrupt:
        if _many_ranks():
            raise
        print("mpipar: interrupted", file=sys.stderr)
        return 130
    except MemoryError as error:
        return _fail(f"the memory is full ({error})", abort=True)
    except (MpiparError, OSError) as error:
        if _many_ranks():
            raise
        if not isinstance(error, MpiparError):  # standard output may be what failed
            outputs.silence_stdout()
        return _fail(str(error))


def _fail(text: str, abort: bool = False) -> int:
    """Print an error and return its exit code; with `abort`, end a job of several ranks."""
    if not (abort and _many_ranks()):
        print(f"mpipar: error: {text}", file=sys.stderr)
        return 2
    from mpi4py import MPI

    from mpipar.comm.abort import end_job

    end_job(f"mpipar: error: rank {MPI.COMM_WORLD.rank} on {platform.node()}: {text}", 2)
    return 2


def _main(arguments: list[str]) -> int:
    unsaid = io.StringIO()  # what a rank other than the first would have printed
    try:
        with _first_rank_speaks(unsaid):
            command: str | int = _command(arguments)
            if isinstance(command, str):
                module = import_module(f"mpipar.cli.{command}")
                config = _read(module.Config, arguments[1:], command)
    except SystemExit as end:  # tyro has printed help or what is wrong
        command = end.code if isinstance(end.code, int) else 2
    if isinstance(command, int):
        return _leave(command, arguments, unsaid)
    if isinstance(config, module.ALONE) and not launch.first_of_job():
        return 0  # the first process of the job does it
    if command == "train":
        return module.run(config, partial(_read, module.Config, arguments[1:], command))
    return module.run(config)


def _leave(code: int, arguments: list[str], unsaid: io.StringIO) -> int:
    """Return the exit code of a process that has nothing to run.

    Where the launcher started others that wait for this one in MPI, that is the end of the job.
    """
    alone = arguments[:1] in (["schedule"], ["plan"], ["convert"], ["trace"]) or arguments[1:2] in (
        ["overhead"],
        ["kernels"],
    )
    if not launch.has_peers() or alone:
        return code
    if launch.start() is not None:  # not one job: nobody waits
        return code
    from mpi4py import MPI

    left = MPI.COMM_WORLD.Ibarrier()  # complete if all processes leave
    limit = time.monotonic() + PATIENCE
    while not left.Test():
        if time.monotonic() > limit:
            said = unsaid.getvalue().rstrip() if code else ""
            return _fail(said or "it has nothing to run, and the others wait for it", abort=True)
        time.sleep(0.01)
    return code


def _command(arguments: list[str]) -> str | int:
    """Return the subcommand, or the exit code if there is none to run."""
    first = arguments[0] if arguments else "--help"
    if first in COMMANDS:
        return first
    if first in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if first == "--version":
        from mpipar import __version__

        print(f"mpipar {__version__}")
        return 0
    known = ", ".join(COMMANDS)
    print(
        f"mpipar: error: there is no command {first!r}; the commands are {known}", file=sys.stderr
    )
    return 2


def _usage() -> str:
    lines = [f"  {name:10} {words}" for name, words in COMMANDS.items()]
    return "\n".join(
        [
            "usage: mpipar COMMAND ...",
            "",
            *lines,
            "",
            "mpipar COMMAND --help lists the flags of a command; mpipar --version",
        ]
    )


def _read(
    config: type, arguments: list[str], command: str, default: object | None = None
) -> object:
    """Return the settings that the arguments give; where they give none, those of `default`."""
    import tyro

    how: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(config, args=arguments, prog=f"mpipar {command}", **how)


@contextmanager
def _first_rank_speaks(unsaid: io.StringIO) -> Iterator[None]:
    """Let only the first process of a job print, since all of them have the same to say.

    `unsaid` gets what another one would have printed.
    """
    if launch.first_of_job():
        yield
        return
    with redirect_stdout(unsaid), redirect_stderr(unsaid):
        try:
            yield
        except SystemExit:
            time.sleep(HEAD_START)
            raise


def _many_ranks() -> bool:
    """Say whether this is one of several ranks, without starting MPI."""
    library = sys.modules.get("mpi4py.MPI")
    if library is None or not library.Is_initialized() or library.Is_finalized():
        return False
    return library.COMM_WORLD.size > 1


if __name__ == "__main__":
    sys.exit(main())
