"""What a parameter holds while its values are not gathered: nothing, and an error for who asks."""

from typing import Any, NoReturn

import numpy as np

from mpipar.errors import StateError, explain

_OWN = ("name", "shape", "dtype")


class Freed(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands in for an array without elements; whoever computes with it gets the parameter's name.

    name: of the parameter; shape: zeros, as many as the parameter has dimensions; dtype.
    """

    base = None
    size = nbytes = 0

    def __init__(self, name: str, ndim: int, dtype: np.dtype) -> None:
        """Say which parameter it stands for."""
        self.name, self.shape, self.dtype = name, (0,) * max(1, ndim), dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def __array_ufunc__(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"array([], dtype={self.dtype.name})"

    def _refuse(self) -> NoReturn:
        """Raise the error."""
        rule = "FSDP has cut it, and it is gathered only inside the forward of its unit"
        fix = (
            "Use it there, leave its module out of units=, or read it in a block of "
            "whole_parameters()"
        )
        raise StateError(explain(self.name, "not whole here", rule, fix))
