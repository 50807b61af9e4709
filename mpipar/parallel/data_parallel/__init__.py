"""Data parallel training: every rank has the whole model, and gradients are reduced in backward.

wrapper.py        DataParallel, the module that users see     set_aside.py     sets of gradients
synchronizer.py   gradients into buckets, and their order     accumulation.py  that are added up
failed_steps.py   steps that a rank cannot end                powersgd.py      low-rank gradients

The buckets themselves lie below, in comm/: buckets.py by messages, shared_buckets.py in memory that
the ranks of a node share.
"""

from mpipar.parallel.data_parallel.powersgd import PowerSGD
from mpipar.parallel.data_parallel.synchronizer import GradientSynchronizer
from mpipar.parallel.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel", "GradientSynchronizer", "PowerSGD"]
