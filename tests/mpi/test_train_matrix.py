"""Every mesh trains to the same numbers: losses and gradient norms of one process, to 1e-10.

A case is a choice for each of the settings below.  On four ranks of MPICH the suite runs few of
them, such that every two values of two settings meet in one where they can; else such that every
value is in one.  `pytest -m full_matrix` runs every case with neither experts nor recomputed
blocks, in pieces that `-k` picks (a mesh, and in a pipeline a schedule and a model: `-k
pp2-cp1-tp2-zbv-llama`), and such that every three values meet of all.  On eight ranks it runs
those of pp2 dp2 tp2.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.errors import MpiparError
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from tests.mpi.test_train_layouts import assert_same

TINY = TrainConfig(
    layers=4,
    dim=24,
    seq=10,
    batch=16,  # 8 micro-batches on each of 2 data-parallel ranks
    steps=3,
    dtype="float64",
    seed=1,
    sample=2,
    dropout=0.1,
    eval_batches=1,
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
}  # and blocks recomputed or not, and experts or none, spread over any ep ranks
ONLY_WITH = {  # settings that mean nothing unless an axis of the mesh is longer than 1
    "cp_layout": "cp",
    "schedule": "pp",
    "microbatches": "pp",
    "sequence_parallel": "tp",
    "overlap": "tp",
}
PAIRED = {**CHOICES, "recompute": (False, True), "experts": (0, 5), "ep": (1, 2, 4)}


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
    if case["experts"]:  # in a pipeline it is that of each micro-batch
        more["balance"] = 0.1 if case["pp"] == 1 else 0.0
    if case["pp"] == 4 and case.get("schedule") in ("interleaved", "zbv"):
        more["layers"] = 8
    return replace(TINY, **case, **more)


def valid(case: Case, ranks: int) -> bool:
    """Say whether mpipar takes the settings of a case."""
    try:
        configured(case).validate(ranks)
    except MpiparError:
        return False
    return True


@cache
def cases(ranks: int) -> list[Case]:
    """Return every case that can run on so many ranks, without those that are the same."""
    found = []
    for shape in shapes(ranks):
        kept = [name for name in CHOICES if name not in ONLY_WITH or shape[ONLY_WITH[name]] > 1]
        for values in product(*(CHOICES[name] for name in kept)):
            case = {**shape, **dict(zip(kept, values, strict=True)), "experts": 0, "ep": 1}
            if valid(case, ranks):
                found += [case, {**case, "experts": 5}]
                spread = ({**case, "experts": 5, "ep": ep} for ep in range(2, ranks + 1))
                found += [one for one in spread if valid(one, ranks)]
    return [{**case, "recompute": again} for case in found for again in (False, True)]


def covering(all_cases: list[Case], together: int) -> list[Case]:
    """Return few of the cases, in which any so many values that meet in one case do (greedy)."""
    names = sorted(set().union(*all_cases))
    tables = {name: list(dict.fromkeys(case.get(name) for case in all_cases)) for name in names}
    codes = np.array([[tables[n].index(case.get(n)) for n in names] for case in all_cases])
    absent = np.array([[n not in case for n in names] for case in all_cases])
    columns, count = [], 1
    for group in combinations(range(len(names)), together):
        keys = codes[:, group] @ (100 ** np.arange(together))
        meetings = np.unique(keys, return_inverse=True)[1] + count
        columns.append(np.where(absent[:, group].any(1), 0, meetings))  # 0: none
        count += len(keys)
    met = np.stack(columns, 1)  # (cases, groups)
    missing = np.zeros(count, bool)
    missing[met] = True
    missing[0] = False
    chosen = []
    while missing.any():
        best = int(missing[met].sum(1).argmax())
        chosen.append(all_cases[best])
        missing[met[best]] = False
    return chosen


def pieces(ranks: int) -> list[Case]:
    """Return the parts of the full matrix: settings that the cases of each have in common."""
    found: list[Case] = []
    for shape in shapes(ranks):
        if ranks < 8 or (shape["pp"], shape["cp"], shape["tp"]) == (2, 1, 2):
            names = ("schedule", "model", *(("fsdp",) if ranks == 8 else ()))
            more = product(*(CHOICES[n] for n in names)) if shape["pp"] > 1 else [()]
            found += [{**shape, **dict(zip(names, values, strict=False))} for values in more]
    return found


def label(piece: Case) -> str:
    """Return the name of a piece in the name of its test."""
    named = ("pp", "cp", "tp", "fsdp")
    return "-".join(f"{k}{v}" if k in named else v for k, v in piece.items())


def part(piece: Case, ranks: int) -> list[Case]:
    """Return the cases of a piece; every combination is among them that means something."""
    usual = {"experts": 0, "ep": 1, "recompute": False}
    free = [
        n for n in CHOICES if n not in piece and (n not in ONLY_WITH or piece[ONLY_WITH[n]] > 1)
    ]
    values = product(*(CHOICES[name] for name in free))
    found = [{**piece, **dict(zip(free, chosen, strict=True)), **usual} for chosen in values]
    assert all(valid(case, ranks) for case in found)
    return found


def run(world: MPI.Intracomm, chosen: list[Case], text: str, steps: int = TINY.steps) -> float:
    """Train every case, and one process for each kind of model; compare.

    Return the largest deviation of a loss or gradient norm, relative.
    """
    neutral: Case = {"pp": 1, "cp": 1, "tp": 1, "sequence_parallel": False, "fsdp": "none"}
    neutral |= {"ep": 1, "recompute": False, "overlap": False, "cp_layout": None}
    neutral |= {"schedule": None, "microbatches": None}
    configs = [replace(configured(case), data=text, steps=steps) for case in chosen]
    kinds = list(dict.fromkeys(replace(config, **neutral) for config in configs))
    mine = {kind: train(kind, MPI.COMM_SELF) for kind in kinds[world.rank :: world.size]}
    alone = {kind: rows for part in world.allgather(mine) for kind, rows in part.items()}
    worst = 0.0
    for case, config in zip(chosen, configs, strict=True):
        try:
            rows, right = train(config, world), alone[replace(config, **neutral)]
            assert_same(rows, right)
        except BaseException as error:
            error.add_note(f"case: {case}")
            raise
        for row, one in zip(rows, right, strict=True):
            for name in one.keys() & {"loss", "grad_norm", "val_loss"}:
                worst = max(worst, abs(row[name] - one[name]) / abs(one[name]))
    return worst


@pytest.mark.time_limit(400)
def test_meshes_give_the_same_numbers(
    world: MPI.Intracomm, text: str, pytestconfig: pytest.Config
) -> None:
    usual = "MPICH" in MPI.get_vendor()[0] and not pytestconfig.getoption("--synchronous-sends")
    together = 2 if world.size == 4 and usual else 1
    few = covering(cases(world.size), together) if world.rank == 0 else []
    run(world, world.bcast(few), text)


@pytest.mark.full_matrix
@pytest.mark.time_limit(36_000)
@pytest.mark.parametrize("piece", pieces(MPI.COMM_WORLD.size), ids=label)
def test_every_mesh_gives_the_same_numbers(world: MPI.Intracomm, text: str, piece: Case) -> None:
    chosen = part(piece, world.size)
    worst = run(world, chosen, text, steps=5)
    if world.rank == 0:
        print(f"{label(piece)}: {len(chosen)} cases, largest deviation {worst:.1e}")


@pytest.mark.full_matrix
@pytest.mark.time_limit(36_000)
def test_every_three_choices_give_the_same_numbers(world: MPI.Intracomm, text: str) -> None:
    if world.size > 4:
        pytest.skip("more cases than can be looked through: run it on 4 ranks or fewer")
    run(world, world.bcast(covering(cases(world.size), 3) if world.rank == 0 else None), text)


def test_no_case_of_the_full_matrix_is_dropped(world: MPI.Intracomm) -> None:
    """Its pieces hold every combination of meshes, layouts, schedules, micro-batches and so on."""
    if world.rank or world.size < 4:
        return
    layouts, shared, tensor, staged = 4, 2 * 2 * 4, 2 * 2, 5 * 4
    expected = sum(
        shared
        * (layouts if shape["cp"] > 1 else 1)
        * (tensor if shape["tp"] > 1 else 1)
        * (staged if shape["pp"] > 1 else 1)
        for shape in shapes(4)
    )
    assert sum(len(part(piece, 4)) for piece in pieces(4)) == expected == 3728
    assert sum(len(part(piece, 8)) for piece in pieces(8)) == shared * tensor * staged


def test_the_chosen_cases_meet_every_pair(world: MPI.Intracomm) -> None:
    """Of the values of two settings, every pair that can be meets in a case."""
    if world.rank or world.size < 4:  # they are those of four ranks
        return
    everything = cases(4)
    few = covering(everything, 2)
    assert len(few) < len(everything) / 10
    for one, two in combinations(PAIRED, 2):
        there = {(case.get(one), case.get(two)) for case in everything}
        met = {(case.get(one), case.get(two)) for case in few}
        for pair in product(PAIRED[one], PAIRED[two]):
            assert pair not in there or pair in met, pair
