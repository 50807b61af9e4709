"""Every change of one operation of every algorithm on 5 ranks is found, or makes no difference."""

import re

import numpy as np
import pytest

from mpipar.errors import ScheduleError
from mpipar.schedule import generators, make, mutants, replay, survivors, verify

NAMES = [f"{c}/{a}" for c, of in generators.items() for a in of]

# Changes that verify accepts: an operation that may as well happen a round earlier or later.
EQUIVALENT = {
    "all_reduce/halving_doubling": 8,
    "all_reduce/hierarchical": 12,
    "all_reduce/recursive_doubling": 2,
    "all_reduce/tree": 16,
    "all_reduce/window": 30,
    "reduce_scatter/pairwise": 60,
    "reduce_scatter/recursive_halving": 5,
    "all_gather/bruck": 15,
    "all_gather/recursive_doubling": 5,
    "all_to_all/bruck": 10,
    "all_to_all/pairwise": 60,
    "broadcast/tree": 4,
    "broadcast/scatter_all_gather": 5,
    "reduce/tree": 4,
    "gather/tree": 2,
    "scatter/tree": 2,
    "barrier/dissemination": 15,
}


def result(schedule):
    """Replay whole numbers, so that the order of additions makes no difference."""
    held = [schedule.initial(rank) for rank in range(schedule.ranks)]
    inputs = [[np.array([3.0**rank, chunk]) for chunk in held[rank]] for rank in range(len(held))]
    return [
        None if blocks is None else [block.tolist() for block in blocks]
        for blocks in replay(schedule, inputs)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_found_with_its_place_or_is_equivalent(name):
    schedule = make(*name.split("/"), 5, root=2)
    right = result(schedule)
    equivalent = 0
    for mutant in mutants(schedule):
        try:
            verify(mutant.schedule)
        except ScheduleError as error:
            text = str(error)
            near = {mutant.rank, mutant.op.peer}
            assert re.search(r"round \d+", text), f"{mutant}: {text}"
            assert re.search(r"\b(chunks? \[?\d+|chunk=\d+)", text), f"{mutant}: {text}"
            found = {int(rank) for rank in re.findall(r"rank (\d+)", text)}
            assert near & found or "names a peer" in text, f"{mutant}: {text}"
        else:
            equivalent += 1
            assert mutant.change in ("late", "early"), str(mutant)
            assert result(mutant.schedule) == right, str(mutant)
    assert equivalent == EQUIVALENT.get(name, 0)


def test_all_kinds_of_changes_are_made():
    made = {mutant.change for mutant in mutants(make("all_reduce", "ring", 5))}
    assert made == {"dropped", "peer", "chunk", "kind", "late", "early", "twice"}


def test_a_mutant_says_what_it_changed():
    first = next(mutants(make("all_reduce", "ring", 5)))
    assert str(first) == "all_reduce/ring: dropped of 4>1, rank 0 in round 0"
    assert len(survivors(make("broadcast", "tree", 5))) == 4
