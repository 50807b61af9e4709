"""The operations on Tensors as functions: `import mpipar.functional as F`, or `mp.functional`.

Names and meanings are PyTorch's where it has them; every function takes Tensors, arrays and
numbers, and is recorded where one of them wants a gradient.
"""

from mpipar.autograd.functional import *  # noqa: F403
from mpipar.autograd.functional import __all__ as __all__
