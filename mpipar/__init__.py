"""mpipar: distributed training on raw MPI communicators over NumPy and CuPy arrays.

The public names are listed, with their types, in `__init__.pyi`; each module is loaded when the
first of its names is used, so that `import mpipar` starts neither MPI nor CUDA.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
__version__ = "0.1.0"
