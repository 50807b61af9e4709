"""The norm of all gradients of a model spread over a mesh, and clipping by it.

Every parameter counts once: its blocks are added over the mesh axes along which its spec is
sharded (those that several ranks of an axis hold, in shares), its replicas are not, and a parameter
that several pipeline stages hold (a tied embedding: same name) is taken from the lowest of them,
on one rank too if its gradient is the same in both.

    weight sharded over tp, 2 ranks        replicated bias        stages 0 and 1 of a pipeline
    |g|^2 = |g0|^2 + |g1|^2 (all_reduce)   |g|^2 here             joined by one all_gather over pp

Cost: one all_reduce of one number a parameter for each set of sharded axes.  Without a mesh nothing
is sent: every parameter counts as it lies on this rank.
"""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, is_device, is_sixteen_bit, module, module_of
from mpipar.errors import ConfigError, explain
from mpipar.nn.linear import is_named
from mpipar.nn.module import tensors_of
from mpipar.nn.spec import Partial
from mpipar.parallel.mesh import Mesh

BLOCK = 1 << 16  # elements squared at a time: the float64 copies stay in cache


def clip_grad_norm(
    params: Iterable[Any], max_norm: float | None, mesh: Mesh | None = None, eps: float = 1e-6
) -> float:
    """Scale all gradients in place so that their global norm is at most max_norm; return the norm.

    Collective over the mesh, after gradients are summed over the data ranks.  The result is the
    norm BEFORE clipping, the same on every rank; squares are summed in float64.  The factor is
    max_norm / (norm + eps) where that is below 1.  max_norm=None only measures.  Gradients whose
    norm is not finite are left as they are: look at the result.  One that all ranks of a node share
    (DataParallel) cannot be written: `.grad` becomes a scaled copy, which `clip_factor` saves.

    mesh=None: for a model that every rank holds whole, and for one process.  No rank asks another:
    the norm is that of the gradients here, equal on all ranks if these are.

    Raises ConfigError for a negative max_norm, a parameter whose spec says Partial on some axis
    (its gradient is not summed yet), and without a mesh for one of which this rank holds a part.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        rule = "it must be a Mesh: a norm is joined over all of its axes"
        raise ConfigError(explain("mesh", type(mesh).__name__, rule, "Pass the mesh, or None"))
    if max_norm is not None and (not isinstance(max_norm, Real) or not max_norm >= 0):
        rule = "it must be a number, and not negative, as no norm is"
        raise ConfigError(explain("max_norm", max_norm, rule, "Pass >= 0, or None to measure"))
    distinct = list({id(param): param for param in tensors_of(params)}.values())
    names, squares = squared_norms(distinct, mesh)
    norm = float(np.sqrt(_sum_once(names, squares, mesh)))
    factor = 1.0 if max_norm is None else clip_factor(norm, max_norm, eps)
    if factor < 1.0:
        for param in distinct:
            if param.grad is not None:
                param.grad = _scaled(param.grad, factor)
    return norm


def clip_factor(norm: float, max_norm: float, eps: float = 1e-6) -> float:
    """Return what gradients of global norm `norm` are to be multiplied by, at most 1.

    For `optimizer.step(grad_scale=)`, which clips without another pass over the gradients.  It is 1
    for a norm that is not finite.
    """
    return min(1.0, max_norm / (norm + eps)) if np.isfinite(norm) else 1.0


def squared_norms(params: list[Any], mesh: Mesh | None) -> tuple[list[str], np.ndarray]:
    """Return the global names, and the squared norm of each whole gradient (float64)."""
    names = []
    squares = _squares([param.grad for param in params])
    sharded: dict[tuple[str, ...], list[int]] = {}
    for i, param in enumerate(params):
        spec = getattr(param, "spec", None)
        names.append(spec.name if spec is not None else "")
        if spec is None:
            continue
        _refuse_partial(spec)
        if mesh is None:
            _refuse_part(spec)
            continue
        cut = [axis for axes in spec.sharded_axes for axis in axes.split("+")]  # "dp+cp" are two
        axes = tuple(sorted(axis for axis in cut if mesh.axis_size(axis) > 1))
        if axes:
            squares[i] /= spec.copies  # the ranks that hold the same block have a share each
            sharded.setdefault(axes, []).append(i)
    for axes in sorted(sharded):  # one order for all ranks of a stage
        assert mesh is not None
        squares[sharded[axes]] = mesh.group(*axes).all_reduce(squares[sharded[axes]])
    return names, squares


def _sum_once(names: list[str], squares: np.ndarray, mesh: Mesh | None) -> float:
    """Return the sum over all parameters of all pipeline stages, those of one name once."""
    stage = 0 if mesh is None else mesh.pp.rank
    table = np.empty((len(names), 2), np.int64)  # (hash of the name, bits of the square)
    for i, name in enumerate(names):
        table[i, 0] = np.uint64(_identity(name, i, stage)).astype(np.int64)
    table[:, 1] = squares.view(np.int64)
    if mesh is None or mesh.pp.size == 1:
        # stages on one rank hold a tied gradient alike; others have the same name by chance
        _, first = np.unique(table, axis=0, return_index=True)
        return float(squares[np.sort(first)].sum())
    table = mesh.pp.all_gather(table, dim=0, sizes="exchange")
    _, first = np.unique(table[:, 0], return_index=True)  # the lowest stage owns a name
    return float(table[np.sort(first), 1].copy().view(np.float64).sum())


def _identity(name: str, index: int, stage: int) -> int:
    """Return 64 bits that are equal for equal names; a parameter without a name is its own."""
    return rng.key(0, name) if is_named(name) else rng.key(1, stage, index)


def _squares(grads: list[Array | None]) -> np.ndarray:
    """Return the sum of squares of each gradient; those of the device come in one copy."""
    squares = np.zeros(len(grads), np.float64)
    there = {}
    for i, grad in enumerate(grads):
        if is_device(grad):
            there[i] = _sum_of_squares(grad)
        elif grad is not None:
            squares[i] = _sum_of_squares(grad)
    if there:
        xp = module("cuda")
        squares[list(there)] = xp.asnumpy(xp.stack(list(there.values())))
    return squares


def _sum_of_squares(grad: Array) -> Any:
    """Return the sum of squares in float64, block by block, where the gradient lives."""
    xp = module_of(grad)
    flat = xp.ascontiguousarray(grad).reshape(-1)
    total = xp.zeros((), np.float64)
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK].astype(np.float64)
        total = total + part @ part
    return total


def _scaled(grad: Array, factor: float) -> Array:
    """Return the gradient times a factor, in place if it may be written.

    16-bit numbers are multiplied in float32 and rounded once.
    """
    out = grad if getattr(grad.flags, "writeable", True) else module_of(grad).empty_like(grad)
    if is_sixteen_bit(grad.dtype):
        out[...] = grad.astype(np.float32) * np.float32(factor)
        return out
    return module_of(grad).multiply(grad, factor, out=out)


def _refuse_partial(spec: Any) -> None:
    """Raise ConfigError for a gradient that is still a sum of terms on several ranks."""
    for axis, how in spec.placements.items():
        if isinstance(how, Partial):
            rule = f"gradients must be summed, but {spec.name} is Partial over {axis}: it is a term"
            raise ConfigError(explain("params", spec.name, rule, f"Sum it over {axis} first"))


def _refuse_part(spec: Any) -> None:
    """Raise ConfigError for a parameter of which this rank holds a part only."""
    if spec.local_shape != spec.shape:
        axes = ", ".join(spec.sharded_axes)
        rule = f"without a mesh all parameters must be whole, but {spec.name} is cut over {axes}"
        raise ConfigError(explain("mesh", None, rule, "Pass the mesh"))
