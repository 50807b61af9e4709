"""A launcher that does not fit is named, and the command that does."""

import os

import pytest

from mpipar.train import launch, terminal


def test_srun_that_started_single_worlds() -> None:
    text = launch.mismatch(1, {"SLURM_NTASKS": "4"}, "MPICH")
    assert text is not None
    for word in ("SLURM_NTASKS=4", "world of 1 rank", "srun --mpi=pmi2", "mpiexec -n 4"):
        assert word in text
    assert "--mpi=pmix" in str(launch.mismatch(1, {"SLURM_NTASKS": "4"}, "Open MPI"))


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (4, {"SLURM_NTASKS": "4"}),
        (1, {"SLURM_NTASKS": "1"}),
        (1, {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}),  # srun -n 1 in a larger job
        (1, {"SLURM_NTASKS": "4", "PMI_SIZE": "1"}),  # mpiexec -n 1 in a larger job
        (1, {"PMI_SIZE": "1"}),
        (1, {"SLURM_NTASKS": "many"}),
        (1, {}),
        (2, {"PMI_SIZE": "2"}),
    ],
)
def test_good_starts(size: int, environ: dict[str, str]) -> None:
    assert launch.mismatch(size, environ, "MPICH") is None


def test_the_mpiexec_of_another_library() -> None:
    text = launch.mismatch(1, {"PMI_SIZE": "2"}, "Open MPI")
    assert text is not None
    for word in ("PMI_SIZE=2", "uses Open MPI", "protocol of MPICH", "-n 2 mpipar train"):
        assert word in text
    text = launch.mismatch(1, {"OMPI_COMM_WORLD_SIZE": "2"}, "MPICH")
    assert text is not None
    assert "protocol of Open MPI" in text


def test_one_process_of_the_job_speaks() -> None:
    assert launch.first_of_job({})
    assert launch.first_of_job({"SLURM_PROCID": "0"})
    assert not launch.first_of_job({"SLURM_PROCID": "1"})
    assert not launch.first_of_job({"PMI_RANK": "3"})


def test_the_command_for_more_ranks_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert launch.command(4, "Open MPI", slots=2) == "mpiexec --oversubscribe -n 4"
    assert launch.command(2, "Open MPI", slots=2) == "mpiexec -n 2"
    assert launch.command(4, "MPICH", slots=2) == "mpiexec -n 4"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert launch.command(2, "Open MPI", 2) == "mpiexec --allow-run-as-root -n 2"


def test_no_terminal_where_output_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "launcher_output", lambda: "/dev/null")
    assert terminal.width() is None
    monkeypatch.setattr(terminal, "launcher_output", lambda: "pipe:[1]")
    assert terminal.width() is None


def test_the_terminal_of_the_launcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    main, side = pty.openpty()
    try:
        monkeypatch.setattr(terminal, "launcher_output", lambda: os.ttyname(side))
        assert terminal.width() == 80
    finally:
        os.close(main)
        os.close(side)
