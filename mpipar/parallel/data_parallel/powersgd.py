"""PowerSGD: the mean of gradients from low-rank factors, for links too slow for the gradients.

A gradient that is a matrix M_w (n, m) on rank w travels as two thin ones; Q (r, m) is the last
step's, the same on all ranks:

    Delta_w = M_w + E_w                      what this rank still owes is added
    P = mean of Q Delta_w^T      (r, n)      all_reduce
    P = orthonormal rows of P                the same on every rank
    Q_w = P Delta_w              (r, m)
    E_w = Delta_w - P^T Q_w                  error feedback: owed until later
    Q = mean of Q_w              (r, m)      all_reduce
    the gradient becomes P^T Q

This is one step of a power iteration: Q keeps its directions from step to step, and is drawn
from `rng` at first.  Nothing is lost: all that came out so far, and the mean of what the ranks
owe, is the sum of the mean gradients.  Every line is linear in the mean, so that the result does
not depend on how a batch is spread over ranks, and P^T Q is exact once r is the rank of the mean.

    message 1   used or not | gradients that are not compressed | P of every matrix
    message 2   Q of every matrix

Cost for r (n + m) numbers instead of n m: two all_reduces a step for all parameters together, and
8 n m r operations.  Vogels, Karimireddy, Jaggi, PowerSGD (NeurIPS 2019), algorithms 1 and 2.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, compute_dtype, module
from mpipar.autograd.engine import can_write
from mpipar.comm import buckets
from mpipar.errors import ConfigError, MismatchError, explain
from mpipar.kernels import low_rank
from mpipar.nn.module import Module, tensors_of
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.wrapped import require_communicator


class PowerSGD:
    """Brings the gradients of parameters together over the ranks of `comm`; see the module.

        compressed = mp.PowerSGD(model, comm, rank=4)
        for x, y in batches:
            model.zero_grad()
            loss_of(model(x), y).backward()
            compressed.sync()                     # param.grad is the low-rank mean over the ranks
            optimizer.step()

    Of a DataParallel module, run the backward under `no_sync()`: else its gradients are reduced
    whole, and then once more.
    Parameters have to start equal on all ranks, as the same seed makes them.  The results have the
    same bits on every rank.

    steps: how often `sync` ran.
    """

    def __init__(
        self,
        parameters: Any,
        comm: Communicator,
        rank: int = 4,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        op: str = "mean",
        *,
        seed: int = 0,
    ) -> None:
        """Collective over `comm`.

        parameters: a module, or Tensors; the same on every rank in the same order.
        rank: the most rows of P and Q.
        start_step: so many steps are not compressed, at first.
        min_compression_rate: compress a gradient of at least two dimensions, reshaped to
        (shape[0], -1), if that makes it more than so many times smaller; others travel as they are.
        op: "mean" over the ranks, or "sum", for losses that are terms of one mean (`token_mean`).
        seed: of the first Q.

        Raises ConfigError for settings that cannot work, and MismatchError on every rank if the
        parameters have other shapes or dtypes, or the settings other values, on some.
        """
        require_communicator(comm)
        _check_settings(rank, start_step, min_compression_rate, op)
        if isinstance(parameters, Module):
            parameters = parameters.parameters()
        trained = [param for param in tensors_of(parameters) if param.requires_grad]
        params = list({id(param): param for param in trained}.values())
        if len(params) < len(trained):
            twice = len(trained) - len(params)
            rule = f"each parameter is there once, and {twice} of these are there before"
            raise ConfigError(
                explain(
                    "parameters", len(trained), rule, "Pass module.parameters(), or each one once"
                )
            )
        self.comm, self.rank, self.op = comm, int(rank), op
        self.start_step, self.min_compression_rate = int(start_step), min_compression_rate
        self.seed, self.steps = seed, 0
        self._entries = [
            _Entry(param, name, self._rank_of(param.data.shape))
            for param, name in zip(params, _names(params), strict=True)
        ]
        self._groups: list[_Group] = []
        self._agree()

    # -- what users call -------------------------------------------------------------------------

    def sync(self) -> bool:
        """Collective: put the result over all ranks in the `.grad` of the parameters.

        A parameter without a gradient counts as zeros, and as None if it has none on any rank.
        A matrix that is not finite comes out as NaN, on every rank, and what is owed of it is
        forgotten.  Returns whether any rank had a gradient.

        Raises BufferMismatchError or DtypeMismatchError for a gradient that is not like its
        parameter.
        """
        for entry in self._entries:
            if entry.param.grad is not None:
                buckets.check_gradient(entry.name, entry.param.data, entry.param.grad)
        whole = self.steps < self.start_step
        if not self._groups or whole != self._groups[0].whole:
            self._groups = _grouped(self._entries, whole)
        for group in self._groups:
            self._begin(group)
            self._reduce(group.head)
        for group in self._groups:
            self._compress(group)
            self._reduce(group.tail)
            self._hand_out(group)
        self.steps += 1
        return any(bool((group.used > 0).any()) for group in self._groups)

    @property
    def message_bytes(self) -> int:
        """Bytes that a rank brings to the all_reduces of a compressed step."""
        return sum(group.nbytes for group in _grouped(self._entries, whole=False, empty=True))

    @property
    def whole_bytes(self) -> int:
        """Bytes that a rank brings to the all_reduce of a step that is not compressed."""
        return sum(group.nbytes for group in _grouped(self._entries, whole=True, empty=True))

    def state_dict(self) -> dict[str, Array]:
        """Return {"steps", "<parameter>.error", "<parameter>.right"}: the very arrays in use.

        The errors are this rank's own: what it owes.  <parameter> is the spec's name, or the
        parameter's number where names are empty or not unique.  Arrays are (n, m) and (r, m).
        """
        state: dict[str, Array] = {"steps": np.array([self.steps], np.int64)}
        for entry in self._compressed:
            state[f"{entry.name}.error"] = entry.error
            state[f"{entry.name}.right"] = entry.right
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the arrays of a state_dict() of the same rank of as many.

        Raises ConfigError naming what is missing, unexpected or of another shape.
        """
        own = self.state_dict()
        found = {
            "missing": sorted(own.keys() - state.keys()),
            "unexpected": sorted(state.keys() - own.keys()),
            "of another shape": sorted(
                key for key in own.keys() & state.keys() if np.shape(state[key]) != own[key].shape
            ),
        }
        if any(found.values()):
            rule = "it must be that of a PowerSGD of the same rank over the same parameters"
            wrong = {what: keys for what, keys in found.items() if keys}
            raise ConfigError(explain("state", wrong, rule, "Load what state_dict() gave"))
        for entry in self._compressed:
            for key in ("error", "right"):
                array = getattr(entry, key)
                array[...] = entry.xp.asarray(state[f"{entry.name}.{key}"])
        self.steps = int(state["steps"][0])

    # -- a step ----------------------------------------------------------------------------------

    def _begin(self, group: "_Group") -> None:
        """Fill message 1."""
        for i, entry in enumerate(group.entries):
            grad = entry.param.grad
            group.used[i] = grad is not None
            if entry.number in group.plain:
                group.plain[entry.number][...] = 0 if grad is None else grad
                continue
            if grad is not None:
                entry.error += grad.reshape(entry.shape)  # Delta
            left = group.left[entry.number]
            entry.xp.matmul(entry.right, entry.error.T, out=left)  # (r, n)

    def _compress(self, group: "_Group") -> None:
        """Turn P into orthonormal rows, fill message 2, and keep what it leaves out."""
        for i, entry in enumerate(group.entries):
            if entry.number in group.plain:
                continue
            left, right = group.left[entry.number], group.right[entry.number]
            entry.finite = bool(entry.xp.isfinite(left).all())
            if not entry.finite:
                right.fill(0)
                continue
            entry.lost = low_rank.orthonormalise(left)
            entry.xp.matmul(left, entry.error, out=right)  # (r, m)
            if group.used[i] > 0:
                low_rank.subtract_product(left, right, entry.error)

    def _hand_out(self, group: "_Group") -> None:
        """Write the results to the parameters."""
        for i, entry in enumerate(group.entries):
            used, param = bool(group.used[i] > 0), entry.param
            if not used:
                param.grad = None
            elif param.grad is None or not can_write(param.grad):
                param.grad = entry.xp.empty_like(param.data)
            if entry.number in group.plain:
                if used:
                    param.grad[...] = group.plain[entry.number]
                continue
            self._hand_out_matrix(group, entry, used)

    def _hand_out_matrix(self, group: "_Group", entry: "_Entry", used: bool) -> None:
        left, right = group.left[entry.number], group.right[entry.number]
        if not entry.finite:
            entry.error.fill(0)
            if used:
                entry.param.grad.fill(np.nan)
            return  # Q stays as it was
        entry.right[...] = right
        if used:
            result = entry.param.grad
            matrix = result.reshape(entry.shape)
            low_rank.product(left, right, matrix)
            if not entry.xp.may_share_memory(matrix, result):  # the gradient has gaps
                result[...] = matrix.reshape(result.shape)
        for row in entry.lost:  # a direction of no use now may be one later
            entry.right[row] = entry.draw(self.seed, self.steps + 1)[row]

    def _reduce(self, flat: Array) -> None:
        if flat.size:
            self.comm.all_reduce(flat, self.op, out=flat)

    # -- what is compressed ----------------------------------------------------------------------

    @property
    def _compressed(self) -> list["_Entry"]:
        return [entry for entry in self._entries if entry.rank]

    def _rank_of(self, shape: tuple[int, ...]) -> int:
        """Return the rows of P and Q for a parameter, 0 for one that is not compressed."""
        if len(shape) < 2 or 0 in shape:
            return 0
        rows, columns = shape[0], int(np.prod(shape[1:]))
        rank = min(self.rank, rows, columns)
        small = rank * (rows + columns) * self.min_compression_rate < rows * columns
        return rank if small else 0

    def _agree(self) -> None:
        """Make sure that all ranks have described the same, and make the first Q."""
        settings = (self.rank, self.start_step, self.min_compression_rate, self.op, self.seed)
        shapes = [(e.param.data.shape, e.param.data.dtype.name) for e in self._entries]
        if self.comm.size > 1:
            asked = buckets.Agreement(self.comm, repr((settings, shapes, self.steps)))
            others = asked.others(wait=True)
            if others:
                raise MismatchError(
                    f"ranks {others} of communicator {self.comm.name!r} have other parameters "
                    "(shapes, dtypes, order), or other settings, than rank 0. Pass the same on "
                    "every rank"
                )
        for number, entry in enumerate(self._entries):
            entry.number = number
            if entry.rank:
                entry.right[...] = entry.draw(self.seed, 0)


class _Entry:
    """A parameter; if it is compressed (rank > 0), what is kept of it from step to step."""

    def __init__(self, param: Any, name: str, rank: int) -> None:
        self.param, self.name, self.rank, self.number = param, name, rank, 0
        self.kind = compute_dtype(param.data.dtype)
        self.device = buckets.Item.like(param.data).device
        self.xp = module(self.device)
        self.finite, self.lost = True, list[int]()
        if rank:
            rows = param.data.shape[0]
            self.shape = (rows, param.data.size // rows)
            self.error: Array = self.xp.zeros(self.shape, self.kind)
            self.right: Array = self.xp.zeros((rank, self.shape[1]), self.kind)

    def draw(self, seed: int, step: int) -> Array:
        """Return random rows (r, m), the same on every rank."""
        key = rng.key(seed, "powersgd", self.name, step)
        where = rng.indices(self.right.shape, (0, 0), self.right.shape)
        return self.xp.asarray(rng.normal(key, where), self.kind)


class _Group:
    """The two messages of the parameters of one dtype and device, and each one's place in them.

    head: used | plain ... | left ...     tail: right ...     by the parameters' numbers
    """

    def __init__(self, entries: list[_Entry], whole: bool, empty: bool) -> None:
        self.entries, self.whole = entries, whole
        first = entries[0]
        plain = [e for e in entries if whole or not e.rank]
        matrices = [e for e in entries if not whole and e.rank]
        sizes = [len(entries), *(e.param.data.size for e in plain)]
        sizes += [e.rank * e.shape[0] for e in matrices]
        widths = [e.rank * e.shape[1] for e in matrices]
        self.nbytes = (sum(sizes) + sum(widths)) * first.kind.itemsize
        if empty:
            return
        self.head: Array = first.xp.zeros(sum(sizes), first.kind)
        self.tail: Array = first.xp.zeros(sum(widths), first.kind)
        self.used, *pieces = _cut(self.head, sizes)
        self.plain = {
            e.number: piece.reshape(e.param.data.shape)
            for e, piece in zip(plain, pieces, strict=False)
        }
        self.left = {
            e.number: piece.reshape(e.rank, -1)
            for e, piece in zip(matrices, pieces[len(plain) :], strict=True)
        }
        self.right = {
            e.number: piece.reshape(e.rank, -1)
            for e, piece in zip(matrices, _cut(self.tail, widths), strict=True)
        }


def _grouped(entries: list[_Entry], whole: bool, empty: bool = False) -> list[_Group]:
    """Return the groups; `empty` ones have sizes only."""
    kinds: dict[Any, list[_Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry.kind.name, entry.device), []).append(entry)
    return [_Group(members, whole, empty) for members in kinds.values()]


def _cut(flat: Array, sizes: Iterable[int]) -> list[Array]:
    """Return consecutive views of a flat array."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(flat[start : start + size])
        start += size
    return pieces


def _names(params: list[Any]) -> list[str]:
    """Return the global names of the parameters, or their numbers where names are no keys."""
    names = [param.spec.name if hasattr(param, "spec") else "" for param in params]
    if "" in names or len(set(names)) != len(names):
        return [str(number) for number in range(len(params))]
    return names


def _check_settings(rank: Any, start_step: Any, min_compression_rate: Any, op: Any) -> None:
    """Raise ConfigError for settings that cannot work."""
    for name, value, least in (("rank", rank, 1), ("start_step", start_step, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            rule = f"it must be a whole number of at least {least}"
            raise ConfigError(explain(name, value, rule, f"Pass {max(least, 4)}, for example"))
    if not isinstance(min_compression_rate, int | float) or not min_compression_rate >= 0:
        rule = "it must be a number, and not negative"
        raise ConfigError(explain("min_compression_rate", min_compression_rate, rule, "Pass 2.0"))
    if op not in ("mean", "sum"):
        raise ConfigError(explain("op", op, "gradients are added", 'Pass "mean" or "sum"'))
