"""Executing pipeline schedules: `Pipeline`, and its parts, one idea a file."""

from mpipar.parallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
