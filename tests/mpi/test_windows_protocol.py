"""Windows when ranks are not in step: delays at every step, handles in flight, errors."""

import logging
import os
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.comm import shared_memory, window_memory, window_reduction
from mpipar.comm.waiting import progress

STEPS = ["release", "ready", "add", "across", "reduced", "done", "fill", "read"]


@pytest.mark.parametrize("layout", ["", "0,0,1,1"], ids=["one", "two"])
@pytest.mark.parametrize("step", STEPS)
def test_a_slow_rank_at_every_step(
    raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, step: str, layout: str
) -> None:
    """One rank after the other is late at one step; others fill and read meanwhile."""

    def pause(at: str, number: int) -> None:
        if at == step and number % raw.size == raw.rank:
            time.sleep(0.003)

    monkeypatch.setattr(window_reduction, "pause", pause)
    if layout:
        monkeypatch.setenv("MPIPAR_FAKE_NODES", layout)
    pattern = np.arange(4099)
    with mp.Communicator(raw) as comm:
        for slots in (1, 2):
            with comm.window(4099, "int64", slots) as window:
                for number in range(1, 9):
                    pause("fill", number)
                    window.buffer[:] = pattern * number + comm.rank
                    result = window.all_reduce()
                    pause("read", number)
                    expected = comm.size * pattern * number + sum(range(comm.size))
                    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("layout", ["", "0,1,1,0"], ids=["one", "two"])
def test_every_rank_slow_at_random(
    raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Two slots in flight: the next reduction starts before the last one's result is read."""
    draws = np.random.default_rng(raw.rank)

    def pause(at: str, number: int) -> None:
        if draws.random() < 0.2:
            time.sleep(draws.random() * 0.002)

    monkeypatch.setattr(window_reduction, "pause", pause)
    if layout:
        monkeypatch.setenv("MPIPAR_FAKE_NODES", layout)
    with mp.Communicator(raw) as comm, comm.window(3000, "int64") as window:
        before, kept = None, 0
        for number in range(1, 41):
            window.buffer[:] = number * 10 + comm.rank
            handle = window.start()
            if before is not None:
                np.testing.assert_array_equal(before.wait(), kept)
            before, kept = handle, comm.size * number * 10 + sum(range(comm.size))
        np.testing.assert_array_equal(before.wait(), kept)


def test_a_fast_rank_fills_its_next_buffer(comm: mp.Communicator) -> None:
    with comm.window(100, "float64") as window:
        first = window.buffer
        first[:] = 1
        handle = window.start()
        assert window.buffer is not first
        window.buffer[:] = 2
        second = window.start()
        assert (second.wait() == 2 * comm.size).all()
        assert (handle.wait() == comm.size).all()
        assert (window.result == 2 * comm.size).all()


def test_a_buffer_that_is_still_read_is_refused(comm: mp.Communicator) -> None:
    with comm.window(100, "float64", slots=1) as window:
        if comm.rank == 0 and comm.size > 1:
            window.buffer[:] = 1
            handle = window.start()
            with pytest.raises(ValueError, match=r"buffer=.*Wait for it first"):
                _ = window.buffer
            with pytest.raises(ValueError, match="reduction 1 of this window"):
                window.start()
        comm.process_group.raw.Barrier()
        if comm.rank > 0:
            window.buffer[:] = 1
            handle = window.start()
        if comm.size > 1:
            assert (handle.wait() == comm.size).all()


def test_windows_and_messages_in_flight_in_any_order(comm: mp.Communicator) -> None:
    with comm.window(5000, "float64") as one, comm.window(7000, "float64") as two:
        one.buffer[:], two.buffer[:] = 1, 2
        handles = [
            one.start(),
            comm.all_reduce(np.full(30000, 3.0), algorithm="ring", async_op=True),
            two.start("mean"),
        ]
        expected = [comm.size, 3 * comm.size, 2]
        for i in [0, 1, 2] if comm.rank % 2 else [2, 1, 0]:
            assert (handles[i].wait() == expected[i]).all()


def test_the_pump_advances_it(comm: mp.Communicator) -> None:
    with comm.window(1000) as window:
        window.buffer[:] = 1
        handle = window.start()
        while not handle.done:
            progress()
        assert (handle.wait() == comm.size).all()


def test_a_rank_that_never_starts_is_named(raw: MPI.Intracomm) -> None:
    with mp.Communicator(raw, timeout=1.1) as comm, comm.window(100) as window:
        if comm.size > 1 and comm.rank == 0:
            handle = window.start()
            with pytest.raises(TimeoutError, match=r"all_reduce\(float32, 100.*window") as caught:
                handle.wait()
            others = list(range(1, comm.size))
            assert f"waiting for ranks {others} of this node to start it" in str(caught.value)
        raw.Barrier()
        if comm.rank > 0:
            handle = window.start()
        if comm.size > 1:
            handle.wait()


def test_different_collectives_are_found(raw: MPI.Intracomm) -> None:
    if raw.size == 1:
        return
    comm = mp.Communicator(raw, check=True)
    window = comm.window(100)
    with pytest.raises((ValueError, TypeError), match="do not agree"):
        window.start("max" if comm.rank == 0 else "sum")
    window.buffer[:] = 1
    assert (window.all_reduce() == comm.size).all()
    comm.destroy()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1,), "n=-1"),
        ((5, "nonsense"), "dtype"),
        ((5, object), "dtype"),
        ((5, "f4", 3), "slots=3"),
    ],
)
def test_arguments_that_cannot_work(comm: mp.Communicator, arguments: tuple, text: str) -> None:
    """One rank's mistake is an error on all."""
    last = comm.rank == comm.size - 1
    with pytest.raises(ValueError, match=text):
        comm.window(*(arguments if last else (5,)))
    with comm.window(3) as window, pytest.raises(ValueError, match=r"op='summe'.*sum"):
        window.start("summe")


def test_ranks_that_ask_for_different_windows(comm: mp.Communicator) -> None:
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"rank 0: 5 elements of float32.*6 elements"):
            comm.window(5 if comm.rank == 0 else 6)


def test_too_little_shared_memory(comm: mp.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 1 << 20)
    with pytest.raises(ValueError, match=r"1,000,000 elements.*takes .* MiB.*has 1\.0 MiB free"):
        comm.window(1_000_000, "float64")
    comm.window(100).destroy()
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: None)
    comm.window(100_000).destroy()


@pytest.mark.parametrize("why", ["switched off", "no windows", "reproducible"])
def test_messages_in_place_of_windows_give_the_same_bits(
    raw: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    with mp.Communicator(raw) as comm, comm.window(1001, "float32") as window:
        window.buffer[:] = np.random.default_rng(comm.rank).standard_normal(1001)
        expected = window.all_reduce("mean").tobytes()
    if why == "switched off" and raw.rank == 0:
        monkeypatch.setenv("MPIPAR_WINDOWS", "0")
    elif why == "no windows":  # on one of the nodes
        monkeypatch.setenv("MPIPAR_FAKE_NODES", "0,1,2,3")
        if raw.rank == raw.size - 1:
            monkeypatch.setattr(shared_memory, "Segment", _refuse)
    elif why == "reproducible":
        if raw.size == 1:
            return
        monkeypatch.setenv("MPIPAR_FAKE_NODES", "0,1,2,3")
    monkeypatch.setattr(window_memory, "_said", set())
    with (
        caplog.at_level(logging.WARNING, "mpipar"),
        mp.Communicator(raw, reproducible=why == "reproducible") as comm,
    ):
        for _ in range(2):
            with comm.window(1001, "float32") as window:
                assert not window.shared
                for _ in range(3):
                    window.buffer[:] = np.random.default_rng(comm.rank).standard_normal(1001)
                    handle = window.start("mean")
                    assert handle.wait().tobytes() == expected
                    assert window.result.tobytes() == expected
                    assert not window.result.flags.writeable
    said = [record for record in caplog.records if "windows use messages" in record.message]
    assert len(said) == (1 if raw.rank == 0 else 0)


def _refuse(*_: object) -> None:
    raise RuntimeError("no such windows")


def test_the_noise_of_open_mpi_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MPI, "get_vendor", lambda: ("Open MPI", (5, 0, 0)))
    with shared_memory._without_noise():
        os.write(2, b"[vm:1] x.c:375  Error: " + shared_memory._NOISE + b" \n \nsomething else\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "something else\nafter\n"
