"""Autograd: tensors over plain arrays, a linear tape, operations with their vjps.

It knows nothing of communication: a collective is a `Function` with `collective = True`.
"""

from mpipar.autograd import functional, operators
from mpipar.autograd.delay import Delay
from mpipar.autograd.function import Function
from mpipar.autograd.gradcheck import gradcheck
from mpipar.autograd.recompute import recompute
from mpipar.autograd.tape import (
    PendingCollectivesWarning,
    Tape,
    add_pump,
    after_backward,
    around_backward,
    enable_grad,
    is_grad_enabled,
    no_grad,
    start_afresh,
)
from mpipar.autograd.tensor import Tensor, backward

from_dlpack = Tensor.from_dlpack

__all__ = [
    "Delay",
    "Function",
    "PendingCollectivesWarning",
    "Tape",
    "Tensor",
    "add_pump",
    "after_backward",
    "around_backward",
    "backward",
    "enable_grad",
    "from_dlpack",
    "functional",
    "gradcheck",
    "is_grad_enabled",
    "no_grad",
    "operators",
    "recompute",
    "start_afresh",
]
