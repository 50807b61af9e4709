"""The command `mpipar`, and `mpipar schedule`, called in this process."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpipar.cli import main as main_module
from mpipar.cli import prove
from mpipar.cli.main import COMMANDS, main
from mpipar.cli.schedule import byte_count, node_sizes, rank_counts
from mpipar.errors import ConfigError
from mpipar.schedule import generators, parse_rounds
from mpipar.train import launch
from mpipar.train.launch import RANK_VARIABLES

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command see itself as started alone, also where the tests run on several ranks."""
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(main_module, "_many_ranks", lambda: False)
    monkeypatch.setattr(launch, "has_peers", lambda: False)


def schedule(line: str) -> int:
    return main(["schedule", *line.split()])


def test_help_and_version(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == usage
    assert main(["--version"]) == 0
    assert re.fullmatch(r"mpipar \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command(capsys: Captured) -> None:
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"mpipar: error: there is no command 'trian'; the commands are {', '.join(COMMANDS)}\n"
    )


HELP = [*COMMANDS, "schedule show", "schedule verify", "schedule simulate", "bench collectives"]


@pytest.mark.parametrize("command", HELP)
def test_help_of_commands(command: str, capsys: Captured) -> None:
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"mpipar {command}" in out
    assert "{None}" not in out


def test_an_unknown_flag(capsys: Captured) -> None:
    assert main(["schedule", "show", "all_reduce/ring", "--rnaks", "3"]) == 2
    assert "--rnaks" in capsys.readouterr().err
    assert main(["schedule", "show", "all_reduce/ring", "-p", "four"]) == 2
    assert "four" in capsys.readouterr().err


MISTAKES = {
    "show all_reduce/rign": ["name='all_reduce/rign'", "ring, tree", "Say all_reduce/"],
    "show allreduce": ["collective='allreduce'", "all_reduce, reduce_scatter"],
    "show all_reduce/ring -p 0": ["p=0", "at least one rank"],
    "show broadcast/tree -p 4 --root 4": ["root=4", "0..3"],
    "show all_reduce/ring --segments 0": ["k=0"],
    "show all_reduce/hierarchical -p 4 --nodes 2,1": ["nodes=(2, 1)", "p=4"],
    "show all_reduce/hierarchical -p 4 --nodes two": ["nodes='two'", "Say 2,2 or 8"],
    "show all_reduce --svg x.svg": ["one picture shows one algorithm"],
    "show all_reduce/ring --svg /nowhere/x.svg": ["svg='/nowhere/x.svg'", "no folder /nowhere"],
    "verify all -p 4..1": ["ranks='4..1'", "1..64"],
    "simulate all_reduce --bytes many": ["bytes='many'", "64MiB"],
    "simulate all_reduce/ring --alpha -1": ["alpha=-1.0", "not negative"],
    "simulate broadcast/scatter_all_gather -p 100000": ["p=100000", "operations"],
    "simulate all_reduce -p 0": ["p=0", "at least one rank"],
    "simulate all_reduce --segments 0": ["k=0"],
    "simulate all_reduce -p 10000000000": ["p=10000000000", "at most 131,072"],
    "simulate all_reduce --bytes .": ["bytes='.'"],
    "simulate all_reduce --bytes 1e400": ["bytes='1e400'"],
    "simulate all_reduce --alpha inf": ["alpha=inf", "finite"],
    "show all_reduce -p 100000": ["p=100000", "more than the 100,000 operations"],
    "show all_reduce/ring --segments 1000000": ["segments=1000000", "at most 131,072"],
    "show all_reduce/ring --width -5": ["width=-5", "20 to"],
    "draw all_reduce/ring --width 0": ["width=0"],
    "verify all -p 1..99999999999": ["ranks='1..99999999999'", "above 131,072"],
    "verify all -p 100000": ["ranks=100000", "squares"],
    "verify all --jobs 0": ["jobs=0", "1 to 256"],
    "verify all --jobs -3": ["jobs=-3"],
    "draw all_to_all": ["one picture shows one algorithm"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line: str, capsys: Captured) -> None:
    assert schedule(line) == 2
    captured = capsys.readouterr()
    error = captured.err
    assert error.startswith("mpipar: error: ")
    assert error.count("\n") == 1
    assert captured.out == ""
    for words in MISTAKES[line]:
        assert words in error


def test_show(capsys: Captured) -> None:
    assert schedule("show all_reduce/ring -p 4") == 0
    out = capsys.readouterr().out
    assert "all_reduce/ring on 4 ranks: 4 chunks, 6 rounds, 24 messages" in out
    assert "|----- +3 ----->|----- +0 ----->|----- +1 ----->|" in out
    assert schedule("show all_reduce -p 4 --nodes 2,2 --segments 2") == 0
    out = capsys.readouterr().out
    for name in generators["all_reduce"]:
        assert f"all_reduce/{name} on 4 ranks" in out
    assert "all_reduce/ring on 4 ranks: 8 chunks" in out
    assert schedule("show shift -p 3 --offset -1") == 0
    assert "2" in capsys.readouterr().out


def test_pictures_are_written(tmp_path: Path, capsys: Captured) -> None:
    for line in ("show broadcast/tree -p 4 --root 2", "draw all_reduce/ring -p 4 --bytes 1MB"):
        path = tmp_path / "picture.svg"
        assert main(["schedule", *line.split(), "--svg", str(path)]) == 0
        assert capsys.readouterr().out == f"wrote {path}\n"
        ElementTree.parse(path)


def test_draw(capsys: Captured) -> None:
    assert schedule("draw all_reduce/ring -p 4 --nodes 2,2 --width 80") == 0
    out = capsys.readouterr().out
    assert out.startswith("all_reduce/ring of 64MiB on 4 ranks: ")
    assert all(f"rank {rank}  |" in out for rank in range(4))
    assert max(map(len, out.splitlines())) <= 80


def test_simulate(capsys: Captured) -> None:
    assert schedule("simulate all_reduce -p 16 --bytes 16MiB --nodes 8") == 0
    out = capsys.readouterr().out
    assert "16 ranks, 2 nodes of 8" in out
    for name in generators["all_reduce"]:
        assert re.search(rf"all_reduce/{name} +[\d.]+ ms +[\d.]+ GB/s +[\d,]+ +[\d.]+ MiB\n", out)
    line = "simulate all_reduce/ring -p 4 --nodes 1 --bytes 4e6 --alpha 1e-3 --beta 1e-9 --gamma 0"
    assert schedule(line) == 0
    assert re.search(r"all_reduce/ring +12 ms +0\.5 GB/s +24 ", capsys.readouterr().out)


def test_simulate_many_ranks(capsys: Captured) -> None:
    assert schedule("simulate all_reduce/halving_doubling -p 100000") == 0
    assert "100,000 ranks, 25,000 nodes of 4" in capsys.readouterr().out


def test_simulate_says_what_it_leaves_out(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["mpipar.schedule.simulate"], "OPERATIONS", 1000)
    assert schedule("simulate broadcast -p 101 --nodes 1") == 0
    out = capsys.readouterr().out
    assert re.search(r"broadcast/tree +[\d.]+ ms", out)
    assert "not simulated: p=101: broadcast/scatter_all_gather takes more than 1,000" in out


def test_verify(capsys: Captured) -> None:
    assert schedule("verify all -p 1..5,8") == 0
    out = capsys.readouterr().out
    for collective, of in generators.items():
        for algorithm in of:
            assert re.search(rf"{collective}/{algorithm} +[\d,]+ +[\d,]+ +[\d.]+\n", out)
    assert "6 rank counts up to 8: all proven" in out


def test_one_is_no_plural(capsys: Captured) -> None:
    assert schedule("verify all_reduce/ring -p 1") == 0
    assert schedule("simulate all_reduce/ring -p 1") == 0
    assert schedule("simulate 1f1b -p 1 -m 1") == 0
    out = capsys.readouterr().out
    for words in ("1 rank count up to 1", "on 1 rank, 1 node", "1 rank, 1 micro-batch;"):
        assert words in out


def test_verify_in_several_processes(capsys: Captured) -> None:
    assert schedule("verify all_gather -p 1..6 --jobs 2") == 0
    alone = capsys.readouterr().out
    assert schedule("verify all_gather -p 1..6 --jobs 1") == 0
    seconds = re.compile(r" +\d+\.\d.*")
    assert seconds.sub("", alone) == seconds.sub("", capsys.readouterr().out)


def test_verify_names_the_place_of_a_fault(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = generators["all_reduce"]["recursive_doubling"]
    lines = ("0>1", "0<0")  # rank 1 takes rank 0's value and adds nothing
    object.__setattr__(broken, "rounds", lambda p, rank: iter(parse_rounds(lines[rank])))
    try:
        assert schedule("verify all_reduce -p 2") == 1
    finally:
        from mpipar.schedule.recursive_doubling import all_reduce

        object.__setattr__(broken, "rounds", all_reduce)
    captured = capsys.readouterr()
    assert re.search(r"all_reduce/recursive_doubling .* WRONG on 2 ranks\n", captured.out)
    assert "not all are right" in captured.out
    assert re.search(r"mpipar: error: .*all_reduce/recursive_doubling.* rank [01] ", captured.err)


def test_kinds() -> None:
    assert list(prove.kinds("all_reduce", "ring", 4)) == [{}]
    roots = [kind["root"] for kind in prove.kinds("broadcast", "tree", 7)]
    assert roots == [0, 2, 3, 6]
    layouts = [kind.get("nodes") for kind in prove.kinds("all_reduce", "hierarchical", 5)]
    assert layouts[0] is None
    assert {(5,), (1,) * 5, (3, 2), (4, 1)} <= set(layouts)


def test_words_for_numbers() -> None:
    assert rank_counts("1..4,8, 16") == [1, 2, 3, 4, 8, 16]
    for text, value in [
        ("7", 7),
        ("64MiB", 2**26),
        ("4kB", 4000),
        ("1e3", 1000),
        ("0.5 GiB", 2**29),
    ]:
        assert byte_count("size", text) == value
    assert node_sizes("2,3", 5) == (2, 3)
    assert node_sizes("4", 10) == (4, 4, 2)
    assert node_sizes(None, 10) is None
    for wrong in ("", "0", "a", "3..", "1,,2"):
        with pytest.raises(ConfigError, match="ranks="):
            rank_counts(wrong)
    for wrong in ("", "1.2.3", "5 apples", "-1", "nan", "0"):
        with pytest.raises(ConfigError, match="size="):
            byte_count("size", wrong, least=1)


def test_only_the_first_rank_of_a_job_speaks(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "HEAD_START", 0)
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["trian"]) == 2
    assert main(["schedule", "show"]) == 2
    assert main(["--help"]) == 0
    assert main(["schedule", "show", "all_reduce/ring"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_an_error_of_one_of_several_ranks_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "_many_ranks", lambda: True)
    with pytest.raises(ConfigError, match="collective="):
        main(["schedule", "show", "nothing"])


def test_a_full_memory_is_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: object) -> int:
        raise MemoryError("no room for 8 TB")

    monkeypatch.setattr("mpipar.cli.schedule.run", full)
    assert schedule("show all_reduce/ring") == 2
    error = "mpipar: error: the memory is full (no room for 8 TB)\n"
    assert capsys.readouterr().err == error


LOADED = """
import sys
from mpipar.cli.main import main
code = main(sys.argv[1:])
heavy = {"mpi4py.MPI", "numba", "matplotlib", "mpipar.train.loop"}
print("loaded", sorted(heavy & set(sys.modules)))
sys.exit(code)
"""


def test_a_command_loads_only_what_it_needs() -> None:
    line = [sys.executable, "-c", LOADED, "schedule", "show", "all_reduce/ring"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("loaded []\n")


def test_python_m_and_a_reader_that_leaves() -> None:
    command = [sys.executable, "-m", "mpipar", "schedule", "show", "all_reduce", "-p", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
