"""Initial values that do not depend on the layout: a shard draws what the whole would have there.

Every element is a function of (seed, global name, global element index) alone, so a weight over
4 ranks is bit for bit the same as on one.  Numbers are made in float64 and rounded once.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np

from mpipar import rng
from mpipar.arrays import DTYPES
from mpipar.arrays import dtype as as_dtype
from mpipar.autograd.tensor import is_float
from mpipar.errors import ConfigError, explain
from mpipar.nn.spec import Spec

BLOCK = 1 << 16  # elements drawn at a time: the float64 temporaries stay in cache
_unnamed: defaultdict[str, Iterator[int]] = defaultdict(count)  # by kind: layers made so far


def seed_of(seed: int | None, name: str, kind: str = "weights") -> int:
    """Return the seed that a layer draws with: `seed`, where it is stated.

    seed=None of a layer with a name is 0: the name tells it from others.  Without a name it is a
    seed of its own, made of the next number of a counter of this process (one for each kind), so
    that no two such layers are equal.  Ranks that build the same layers in the same order get the
    same seeds; those that do not (stages of a pipeline) must state names or seeds wherever a weight
    shall not depend on the layout.
    """
    if seed is not None:
        if not isinstance(seed, int | np.integer):
            raise ConfigError(explain("seed", seed, "it must be an integer", "Pass one, or None"))
        return int(seed)
    return 0 if name else rng.key(0, "unnamed", kind, next(_unnamed[kind]))


def float_dtype(dtype: object) -> np.dtype:
    """Return the dtype of a parameter; raises ConfigError for what is no floating-point dtype."""
    try:
        found = as_dtype(dtype)
    except TypeError:
        found = None
    if found is None or not is_float(found):
        rule = "a parameter must be floating-point"
        raise ConfigError(explain("dtype", dtype, rule, f"Choose from {', '.join(DTYPES)}"))
    return found


def draw(
    spec: Spec,
    seed: int,
    std: float | None = None,
    bound: float | None = None,
    dtype: object = "float32",
) -> np.ndarray:
    """Return the local block of a random array: a new array of spec.local_shape.

    spec: of an array with at least one dimension.  std: normal numbers with mean 0 and this
    standard deviation; bound: uniform numbers in [-bound, bound).  Exactly one of them is given.
    """
    assert (std is None) != (bound is None), "either std or bound"
    key = rng.key(seed, spec.name)
    out = np.empty(spec.local_shape, float_dtype(dtype))
    step = max(1, BLOCK * len(out) // max(out.size, 1))
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        if std is not None:
            out[rows] = rng.normal(key, spec.global_index(rows)) * std
        elif bound is not None:
            out[rows] = (rng.uniform(key, spec.global_index(rows)) * 2.0 - 1.0) * bound
    return out
