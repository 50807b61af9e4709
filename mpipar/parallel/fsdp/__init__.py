"""Fully sharded data parallel training: FSDP, its settings, and the loss scale of float16.

config.py     strategies                    gather.py     whole parameters, where they are used
build.py      which parameters go together  boundary.py   before forward and before backward
layout.py     flat arrays and their cuts    gradients.py  whole gradients and those of shards
unit.py       parameters and shards         reducer.py    from the ones to the others
links.py      communicators                 state.py      whole values and back, who holds what
watch.py      when to gather anew           flags.py      which parameters are trained
backward.py   what an exception leaves      freed.py      a parameter that is not gathered
wrapper.py    the module that users see     memory.py, scaler.py
"""

from mpipar.parallel.fsdp.config import FsdpConfig, NothingToOffloadWarning
from mpipar.parallel.fsdp.scaler import LossScaler
from mpipar.parallel.fsdp.state import ShardInfo
from mpipar.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP", "FsdpConfig", "LossScaler", "NothingToOffloadWarning", "ShardInfo"]
