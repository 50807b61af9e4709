"""Checkpoints that any mesh loads, whatever mesh saved them."""

from mpipar.checkpoint.load import load
from mpipar.checkpoint.save import Saving, save

__all__ = ["Saving", "load", "save"]
