"""Schedules: collective algorithms as data, and everything that reads them."""

from mpipar.schedule import direct, ring  # noqa: F401  (each enters its algorithms into the table)
from mpipar.schedule.core import COLLECTIVES, CommSchedule, Op, Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import Generator, algorithms, generators, make
from mpipar.schedule.segment import segment

__all__ = [
    "COLLECTIVES",
    "CommSchedule",
    "Generator",
    "Op",
    "Recv",
    "RecvReduce",
    "Round",
    "Send",
    "algorithms",
    "generators",
    "make",
    "segment",
]
