"""Schedules: collective algorithms as data, and everything that reads them."""

from mpipar.schedule import (  # noqa: F401  (each enters its algorithms into the table)
    bruck,
    direct,
    dissemination,
    halving_doubling,
    hierarchical,
    linear,
    pairwise,
    recursive_doubling,
    recursive_halving,
    ring,
    scatter_all_gather,
    tree,
    window,
)
from mpipar.schedule.core import (
    COLLECTIVES,
    CommSchedule,
    Op,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Round,
    Send,
)
from mpipar.schedule.draw import draw
from mpipar.schedule.mutate import Mutant, mutants, survivors
from mpipar.schedule.network import Network
from mpipar.schedule.registry import Generator, algorithms, generators, make
from mpipar.schedule.replay import replay
from mpipar.schedule.segment import segment
from mpipar.schedule.simulate import Result, simulate
from mpipar.schedule.stagger import cut, stagger
from mpipar.schedule.text import describe, parse_rounds
from mpipar.schedule.transpose import transpose
from mpipar.schedule.verify import Counts, count, verify

__all__ = [
    "COLLECTIVES",
    "CommSchedule",
    "Counts",
    "Generator",
    "Mutant",
    "Network",
    "Op",
    "Read",
    "ReadReduce",
    "Recv",
    "RecvReduce",
    "Result",
    "Round",
    "Send",
    "algorithms",
    "count",
    "cut",
    "describe",
    "draw",
    "generators",
    "make",
    "mutants",
    "parse_rounds",
    "replay",
    "segment",
    "simulate",
    "stagger",
    "survivors",
    "transpose",
    "verify",
]
