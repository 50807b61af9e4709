"""Every mesh trains to the same numbers: losses and gradient norms of one process, to 1e-10.

A case is a choice for each of the settings below.  On four ranks the suite runs few of them, such
that every two values of two settings meet in one where they can; on other numbers of ranks, such
that every value is in one.  `pytest -m full_matrix` runs all.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpipar.errors import MpiparError
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from mpipar.train.report import Row
from tests.mpi.test_train_layouts import assert_same

TINY = TrainConfig(
    layers=4, dim=24, seq=18, batch=8, steps=5, dtype="float64", seed=1, sample=2, dropout=0.1
)
Case = dict[str, Any]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt2", "llama"),
    "tied": (True, False),
    "cp_layout": ("contiguous", "zigzag", "ulysses", "hybrid"),
    "schedule": SCHEDULES,
    "microbatches": (1, 3, 4, 8),
    "sequence_parallel": (False, True),
    "overlap": (False, True),
    "fsdp": ("none", "1", "2", "3"),
}
ONLY_WITH = {  # settings that mean nothing unless an axis of the mesh is longer than 1
    "cp_layout": "cp",
    "schedule": "pp",
    "microbatches": "pp",
    "sequence_parallel": "tp",
    "overlap": "tp",
}


def shapes(ranks: int) -> Iterator[Case]:
    """Yield the sizes of every mesh of so many ranks."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, cp, tp in product(sizes, repeat=3):
        if ranks % (pp * cp * tp) == 0:
            yield {"pp": pp, "cp": cp, "tp": tp}


def configured(case: Case) -> TrainConfig:
    """Return the settings of a case, in sizes that its mesh can cut."""
    heads = 6 if case["tp"] == 3 else 4
    more: Case = {"heads": heads}
    if case["model"] == "llama":
        more |= {"kv_heads": heads // 2 if case["tp"] < 3 else heads, "hidden": 36}
    if case["pp"] == 4 and case.get("schedule") in ("interleaved", "zbv"):
        more["layers"] = 8
    return replace(TINY, **case, **more)


def cases(ranks: int) -> list[Case]:
    """Return every case that can run on so many ranks, without those that are the same."""
    found = []
    for shape in shapes(ranks):
        kept = [name for name in CHOICES if name not in ONLY_WITH or shape[ONLY_WITH[name]] > 1]
        for values in product(*(CHOICES[name] for name in kept)):
            case = {**shape, **dict(zip(kept, values, strict=True))}
            try:
                configured(case).validate(ranks)
            except MpiparError:
                continue
            found.append(case)
    return found


def covering(all_cases: list[Case], together: int) -> list[Case]:
    """Return few of the cases, in which any so many values that meet in one case do (greedy)."""
    meetings = [set(combinations(sorted(case.items()), together)) for case in all_cases]
    missing = set().union(*meetings)
    chosen = []
    while missing:
        best = max(range(len(meetings)), key=lambda n: len(meetings[n] & missing))
        chosen.append(all_cases[best])
        missing -= meetings[best]
    return chosen


@pytest.fixture
def text(shared_path: Path, world: MPI.Intracomm) -> str:
    """A short text that all ranks read."""
    path = shared_path / "text.txt"
    if world.rank == 0:
        path.write_text("".join(f"{n} and {n} are {n + n}\n" for n in range(300)))
    world.barrier()
    return str(path)


def run(world: MPI.Intracomm, chosen: list[Case], text: str) -> None:
    """Train every case, and one process for each kind of model; compare."""
    alone: dict[TrainConfig, list[Row]] = {}
    neutral = {"pp": 1, "cp": 1, "tp": 1, "sequence_parallel": False, "fsdp": "none"}
    neutral |= {"overlap": False, "schedule": "1f1b", "microbatches": None, "cp_layout": "zigzag"}
    for case in chosen:
        config = replace(configured(case), data=text)
        single = replace(config, **neutral)
        if single not in alone:
            alone[single] = train(single, MPI.COMM_SELF)
        try:
            assert_same(train(config, world), alone[single])
        except BaseException as error:
            error.add_note(f"case: {case}")
            raise


@pytest.mark.time_limit(400)
def test_meshes_give_the_same_numbers(world: MPI.Intracomm, text: str) -> None:
    run(world, covering(cases(world.size), 2 if world.size == 4 else 1), text)


@pytest.mark.full_matrix
@pytest.mark.time_limit(36_000)
def test_every_mesh_gives_the_same_numbers(world: MPI.Intracomm, text: str) -> None:
    run(world, cases(world.size), text)


def test_the_chosen_cases_meet_every_pair() -> None:
    """Of the values of two settings, every pair that can be meets in a case."""
    everything = cases(4)
    few = covering(everything, 2)
    assert len(few) < len(everything) / 10
    for one, two in combinations(CHOICES, 2):
        for pair in product(CHOICES[one], CHOICES[two]):
            where = [case for case in everything if (case.get(one), case.get(two)) == pair]
            assert not where or any((c.get(one), c.get(two)) == pair for c in few), pair
