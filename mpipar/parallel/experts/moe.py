"""A mixture of experts: an MLP of which every token uses k of E parts, spread over ranks.

    p = softmax(x R^T)                    router R [E, C], replicated
    y_t = sum_j w_tj MLP_e(x_t)           e = the k experts with the highest p_te, w_tj = p_te
                                          (divided by their sum if k > 1)

8 experts over 4 ranks by partition.blocks: 0 1 | 2 3 | 4 5 | 6 7.  A step of a layer:

    route   one all_gather of E numbers a rank: how many tokens go where
    there   tokens travel to their experts' ranks, as many as there are (exchange)
    MLP     each expert multiplies its rows
    back    results travel back, and are added by their weights

Shazeer et al. (2017); GShard (Lepikhin et al., 2020); Switch Transformers (Fedus et al., 2021).
Cost: 2 exchanges forward and 2 backward, each of k T C (p-1)/p elements a rank if tokens spread
evenly; an all_gather and an all_reduce of E numbers.  Before the first call, one all_gather of the
settings.

Whose gradients are summed over which ranks of a mesh:

    experts   sharded over "ep" in their specs: a rank of mesh.ep gets the tokens of all ranks of
              mesh.ep, so theirs are summed over mesh.group("edp") only: DataParallel leaves them
              alone, `sum_gradients(expert_parameters(model), mesh.group("edp"))` adds them
    router    replicated: a term of the sum over dp and cp, as of any other replicated parameter

With an ep of 1 experts are replicated like any other parameter.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np

from mpipar.arrays import Array, beside, compute_dtype, is_sixteen_bit, module_of
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.autograd.record import array
from mpipar.comm.agreement import agree
from mpipar.comm.buffers import DTYPES
from mpipar.comm.device import read
from mpipar.errors import BufferMismatchError, ConfigError, MpiparError, explain
from mpipar.nn import init
from mpipar.nn.linear import check_scale, check_size, join
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.experts.operations import Balance, Combine, Dispatch, GroupedLinear, Pick
from mpipar.parallel.experts.routing import (
    Plan,
    choose,
    make_plan,
    within_capacity,
    within_capacity_by_index,
)
from mpipar.parallel.replicated import copy_to, reduce_from
from mpipar.parallel.wrapped import require_communicator

AXIS = "ep"
ACTIVATIONS = ("gelu", "swiglu")
SHOWN: dict[str, Callable[[int], object]] = {
    "activation": ACTIVATIONS.__getitem__,
    "dtype": DTYPES.__getitem__,
    "capacity": lambda value: value or None,
    "capacity_factor": lambda bits: float(np.int64(bits).view(np.float64)) or None,
    **dict.fromkeys(("normalise", "index", "training"), bool),
}  # how a message says them


class MoE(Module):
    """The layer.  Input and output (..., C): this rank's tokens, any number of them.

    router [E, C] is replicated; up [E/p, H, C] (gate and up together, [E/p, 2H, C], for "swiglu")
    and down [E/p, C, H] hold this rank's experts, sharded over "ep" along dimension 0 and, with
    `tp`, over "tp" along H.  No biases.

    Of the last forward: balance_loss, a Tensor (see `Balance`), to be added to the loss times a
    small factor; load, the number of tokens that chose each expert, over all ranks; dropped, how
    many choices found their expert full.

    Gradients: a rank's experts have met the tokens of all ranks of mesh.ep already, so theirs are
    summed over mesh.group("edp"), the ranks with the same experts; those of router and shared
    experts over mesh.group("dp", "cp"), as of any replicated parameter.  DataParallel does the
    latter and leaves spread experts alone; with a loss of `token_mean` over dp and cp:

        model = mp.DataParallel(model, mesh.group("dp", "cp"), op="sum")
        loss.backward()
        mp.sum_gradients(mp.expert_parameters(model), mesh.group("edp"))
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        k: int,
        comm: Communicator,
        capacity: int | None = None,
        *,
        capacity_factor: float | None = None,
        activation: str = "gelu",
        normalise: bool | None = None,
        shared: int = 0,
        over: Communicator | None = None,
        tp: Communicator | None = None,
        seed: int | None = None,
        name: str = "",
        std: float | None = None,
        down_std: float | None = None,
        dtype: Any = "float32",
    ) -> None:
        """Make this rank's experts (partition.blocks of `experts`), without communication.

        All settings but seed and std must be those of every rank of `over`, at the latest when
        `forward` runs for the first time.

        dim: C.  hidden: H, of each expert.  k: experts a token.  comm: the ranks that share the
        experts, mesh.ep.
        capacity: how many tokens each expert takes in a call, over all ranks of `over`; None: all.
        capacity_factor: the same as a multiple of the even share, k tokens / experts, rounded up.
        activation: "gelu", down(gelu(up x)), or "swiglu", down(silu(gate x) * up x).
        normalise: divide the weights of a token by their sum; None: if k > 1.
        shared: the hidden size of an expert that every token uses besides, replicated; 0: none.
        over: all ranks that hold tokens of a batch, mesh.group("dp", "cp"): capacity and balance
        are decided over these.  None: comm.  tp: ranks that share each expert's H.
        std: of normal weights, down_std: of the down weights if another; None: uniform
        +-1/sqrt(in), as nn.Linear.

        Raises ConfigError for settings that cannot be: k above experts, say.
        """
        for called, group, fix in (
            ("comm", comm, "Pass mesh.ep"),
            ("over", over or comm, 'Pass mesh.group("dp", "cp")'),
            ("tp", tp or comm, "Pass mesh.tp"),
        ):
            require_communicator(group, called, fix)
        over = over or comm
        _check(dim, hidden, experts, k, capacity, capacity_factor, activation, shared, comm, over)
        for scale in (std, down_std):
            if scale is not None:
                check_scale("std", scale)
        self.dim, self.hidden, self.experts, self.k = dim, hidden, experts, k
        self.comm, self.over, self.tp = comm, over, tp
        self.capacity, self.capacity_factor = capacity, capacity_factor
        self.activation = activation
        self.normalise = k > 1 if normalise is None else bool(normalise)
        self.balance_loss: Tensor | None = None
        self.load, self.dropped = np.zeros(experts, np.int64), 0
        self.shared, self._settings_agreed = shared, False
        self._rows_of_over = [over.ranks.index(rank) for rank in comm.ranks]
        seed = init.seed_of(seed, name)
        down_std = std if down_std is None else down_std

        def make(part: str, shape: tuple[int, ...], cut: int, joined: int, std: Any) -> Parameter:
            """Draw a weight [..., out, in]; its dimension `cut` is H, `joined` times."""
            spec = Spec.replicated(join(name, part), shape)
            if len(shape) == 3 and comm.size > 1:
                spec = spec.shard(AXIS, 0, comm.rank, comm.size)
            if tp is not None and joined:
                spec = spec.shard("tp", cut, tp.rank, tp.size, (shape[cut] // joined,) * joined)
            bound = shape[-1] ** -0.5 if std is None else None
            return Parameter(init.draw(spec, seed, std, bound, dtype), spec)

        both = 2 if activation == "swiglu" else 1  # gate and up
        self.router = make("router", (experts, dim), 0, 0, std)
        self.up = make("up", (experts, both * hidden, dim), 1, both, std)
        self.down = make("down", (experts, dim, hidden), 2, 1, down_std)
        self.shared_up = self.shared_down = None
        if shared:
            self.shared_up = make("shared_up", (both * shared, dim), 0, both, std)
            self.shared_down = make("shared_down", (dim, shared), 1, 1, down_std)

    def forward(self, x: Any, index: Any = None) -> Tensor:
        """Return y (..., C) for x (..., C).  Collective over `comm` and `over`.

        index: the global index of each token (...), integers, by which an expert that is full has
        chosen its tokens: the same ones whatever rank holds them.  None: in the order of the ranks.

        Raises BufferMismatchError, on every rank and before tokens travel, for an x of another
        width or an index of another shape, and MismatchError if the ranks differ; in the first
        call also if the layers were made with different settings.
        """
        self._agree_on_settings()
        problem = self._problem(x, index)
        if problem is None:
            tokens = (x if isinstance(x, Tensor) else Tensor(x)).reshape(-1, self.dim)  # (T, C)
        else:  # take part in telling the others
            xp = module_of(self.router.data)
            tokens = Tensor(xp.zeros((0, self.dim), self.router.dtype))
        scores = F.softmax(_widened(F.linear(tokens, self.router)))  # (T, E)
        choice = choose(scores.data, self.k)  # (T, k)
        plan, total = self._plan(choice, array(x).dtype, index, problem)
        weights = Pick.apply(scores, choice)  # (T, k)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        shares = self.load / max(self.k * total, 1)
        self.balance_loss = Balance.apply(scores, shares, total, self.over)
        rows = Dispatch.apply(tokens, plan)  # (R, C)
        y = Combine.apply(self._compute(rows, plan), weights, plan)  # (T, C)
        if self.shared_up is not None:
            y = y + self._shared(tokens)
        return y.reshape(*x.shape)

    def _plan(
        self, choice: Array, dtype: np.dtype, index: Any, problem: MpiparError | None
    ) -> tuple[Plan, int]:
        """Tell all ranks how many tokens go where; return the plan, and the number of tokens.

        The numbers are read on the host: on a GPU this waits for it.  So are the choices, if
        experts can be full.
        """
        numbers = module_of(choice).bincount(choice.reshape(-1), minlength=self.experts).tolist()
        kind = 0 if problem else DTYPES.index(dtype.name)
        facts = {"dtype": kind, "index": int(index is not None), "tokens": len(choice)}
        facts["training"] = int(self.training)  # the block drops tokens only then
        told = [f"to expert {e}" for e in range(self.experts)]
        facts.update(zip(told, numbers, strict=True))
        differ = {"tokens", *told}
        table = agree(self.over.process_group, "MoE", facts, differ, problem, SHOWN)
        counts = np.array([table[one] for one in told]).T  # (ranks of over, E)
        self.load, total = counts.sum(0), sum(table["tokens"])
        capacity = self._limit(total)
        keep, kept = None, counts
        if capacity is not None:
            here = read(choice)
            if index is None:
                keep, kept = within_capacity(here, counts, capacity, self.over.rank)
            else:
                flat = read(array(index)).reshape(-1)
                keep, kept = within_capacity_by_index(
                    here, flat, table["tokens"], capacity, self.over, self.experts
                )
            keep = beside(keep, choice)
        self.dropped = int(counts.sum() - kept.sum())
        return make_plan(choice, keep, kept[self._rows_of_over], self.comm), total

    def _agree_on_settings(self) -> None:
        """Collective in the first call: raise MismatchError if layers were made differently."""
        if self._settings_agreed:
            return
        facts = {name: int(getattr(self, name)) for name in ("dim", "hidden", "experts", "k")}
        facts["capacity"] = int(self.capacity or 0)
        facts["capacity_factor"] = _bits(self.capacity_factor)
        facts["activation"] = ACTIVATIONS.index(self.activation)
        facts["normalise"] = int(self.normalise)
        facts["shared"] = int(self.shared)
        facts["ranks of ep"] = self.comm.size
        facts["ranks of tp"] = 1 if self.tp is None else self.tp.size
        facts["dtype"] = DTYPES.index(self.router.dtype.name)
        agree(self.over.process_group, "MoE", facts, show=SHOWN)
        self._settings_agreed = True

    def _limit(self, total: int) -> int | None:
        """Return how many of `total` tokens an expert takes; None: all that come."""
        if self.capacity_factor is None:
            return self.capacity
        share = self.capacity_factor * self.k * total / self.experts
        return total if share >= total else ceil(share)

    def _compute(self, rows: Any, plan: Plan) -> Any:
        """Run this rank's experts on their rows (R, C)."""
        rows = rows if self.tp is None else copy_to(self.tp, rows)
        inner = self._activate(GroupedLinear.apply(rows, self.up, plan.sizes))  # (R, H)
        out = GroupedLinear.apply(inner, self.down, plan.sizes)
        return out if self.tp is None else reduce_from(self.tp, out)

    def _shared(self, tokens: Any) -> Any:
        """Run the expert that every token uses."""
        tokens = tokens if self.tp is None else copy_to(self.tp, tokens)
        out = F.linear(self._activate(F.linear(tokens, self.shared_up)), self.shared_down)
        return out if self.tp is None else reduce_from(self.tp, out)

    def _activate(self, x: Any) -> Any:
        if self.activation == "gelu":
            return F.gelu(x)
        gate, up = F.split(x, x.shape[-1] // 2, dim=-1)
        return F.swiglu(gate, up)

    def _problem(self, x: Any, index: Any) -> MpiparError | None:
        """Return what is wrong with this rank's input."""
        shape = tuple(getattr(x, "shape", ()))
        if not shape or shape[-1] != self.dim or array(x).dtype != self.router.dtype:
            given = (shape, array(x).dtype.name)
            rule = f"it must be (..., {self.dim}) of {self.router.dtype.name}"
            return BufferMismatchError(explain("x (shape, dtype)", given, rule, "Convert it"))
        if index is None:
            return None
        places = array(index)
        if places.shape != shape[:-1] or places.dtype.kind not in "iu":
            given = (places.shape, places.dtype.name)
            rule = f"it must be integers of the tokens' shape, {shape[:-1]}"
            return BufferMismatchError(explain("index", given, rule, "Give each token its own"))
        return None

    def extra_repr(self) -> str:
        """Return the sizes and how many experts this rank holds."""
        sizes = f"dim={self.dim}, hidden={self.hidden}, experts={self.experts}, k={self.k}"
        return f"{sizes}, local={self.up.spec.local_shape[0]}"


def balance_loss(module: Module) -> Any:
    """Return the sum of the balance losses of all MoE layers of a module, of the last forward.

    0.0 if there are none.
    """
    layers = [one for one in module.modules() if isinstance(one, MoE)]
    return sum((one.balance_loss for one in layers if one.balance_loss is not None), 0.0)


def expert_parameters(module: Module) -> list[Parameter]:
    """Return the parameters of experts that are spread over a group: "ep" is in their specs."""
    return [param for param in module.parameters() if AXIS in param.spec.placements]


def _bits(factor: float | None) -> int:
    """Return a number that only this factor has; 0 for None."""
    return int(np.float64(factor or 0.0).view(np.int64))


def _widened(logits: Tensor) -> Tensor:
    """Return 16-bit logits in float32: what is close shall not become equal."""
    dtype = logits.data.dtype
    return F.astype(logits, compute_dtype(dtype)) if is_sixteen_bit(dtype) else logits


def _check(
    dim: int, hidden: int, experts: int, k: int, capacity: Any, factor: Any, activation: str,
    shared: int, comm: Communicator, over: Communicator,
) -> None:  # fmt: skip
    """Raise ConfigError for settings that cannot be."""
    for name, size in (("dim", dim), ("hidden", hidden), ("experts", experts), ("k", k)):
        check_size(name, size)
    if k > experts:
        rule = f"a token must choose among the {experts} experts, each at most once"
        raise ConfigError(explain("k", k, rule, f"Pass k <= {experts}"))
    if capacity is not None:
        check_size("capacity", capacity)
    if factor is not None:
        check_scale("capacity_factor", factor)
        if capacity is not None or factor == 0:
            rule = "it must be above 0, and given without a capacity"
            raise ConfigError(explain("capacity_factor", factor, rule, "Pass one of the two"))
    if shared:
        check_size("shared", shared)
    if activation not in ACTIVATIONS:
        rule = f"it must be one of {', '.join(ACTIVATIONS)}"
        raise ConfigError(explain("activation", activation, rule, "Choose one of them"))
    if not set(comm.ranks) <= set(over.ranks):
        rule = "it must hold all ranks of comm, and those that hold tokens besides"
        fix = 'Pass mesh.group("dp", "cp")'
        raise ConfigError(explain("over.ranks", over.ranks, rule, fix))
