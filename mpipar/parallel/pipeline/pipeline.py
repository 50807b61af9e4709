"""Pipeline: a model cut into stages, run by a schedule of micro-batches.

    rank 0  F0 F1 .  .  B0 F2 B1 .  B2          1F1B, 2 ranks, 3 micro-batches
    rank 1  .  F0 B0 F1 B1 F2 B2

Each rank walks down its row of the lowered schedule (`mpipar.schedule.pipeline`): it computes, and
posts messages, which travel meanwhile.  Nothing else decides what happens when, so what was
verified is what runs.  Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et
al. 2023 and 2024 (zero bubble).

Cost of a step: for each border between ranks and each micro-batch one message of the activations
and one of their gradient; and two small collectives, on the batch before and on the loss after it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.autograd import is_grad_enabled
from mpipar.errors import BufferMismatchError, ConfigError, MpiparError, StateError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.agreement import exchange
from mpipar.parallel.pipeline.arrange import Stages, arrange, build
from mpipar.parallel.pipeline.batch import cut
from mpipar.parallel.pipeline.executor import BACKWARD, FORWARD, Executor, Pass
from mpipar.parallel.pipeline.stage import Loss, Stage, leaves_of
from mpipar.parallel.pipeline.tied import TiedGradients
from mpipar.schedule.pipeline import Action, PipelineSchedule
from mpipar.trace import Timeline


class Pipeline:
    """The stages of a model on the ranks of `comm`, and the schedule that runs them.

        def loss_fn(output, target):          # of a micro-batch: its term of the batch's mean
            return mp.functional.cross_entropy(output, target, reduction="sum") / total

        pipeline = mp.Pipeline(stages, mesh.pp, schedule="1f1b", microbatches=8)
        total = targets.size                  # of the whole batch
        loss = pipeline.step(inputs, targets, loss_fn)     # gradients are in .grad, as of the batch
        optimizer.step()

    Losses and gradients of micro-batches are ADDED, so each is divided by the number of the whole
    batch: over all ranks of dp, where DataParallel(op="sum") or `sum_gradients` adds theirs.
    stages: this rank's modules, by number.  schedule: the PipelineSchedule, with its messages.
    """

    def __init__(
        self,
        stages: Stages,
        comm: Communicator,
        schedule: str = "1f1b",
        microbatches: int = 8,
        *,
        chunks: int | None = None,
        on_stage_done: Callable[[int], object] | None = None,
    ) -> None:
        """Collective over `comm`; every rank passes the same.

        stages: the list of all stages' modules, or a function from a stage's number to its module,
        which is called for this rank's own.  Each takes one Tensor and returns one; the first is
        called with the inputs as they are passed to `step`.  Parameters of one global name
        (`spec.name`) on several stages are one parameter: see `tied`.
        schedule: gpipe, 1f1b, interleaved, zb1p, zbv, or the path of a CSV file.
        microbatches: parts of a batch.  chunks: stages on each rank, for interleaved; None: as many
        as the list has, or 2.
        on_stage_done: called with the number of a stage of this rank when its last backward pass
        has ended, once a step; tied gradients are summed later.  DataParallel and FSDP need none:
        they sync in their last micro-batch's backward, FSDP at the end of the step if weight
        gradients are put off or tied.

        Raises, on every rank, ConfigError for settings that cannot work, ScheduleError for a file
        whose schedule is wrong, MismatchError if the ranks pass different settings.
        """
        if not isinstance(comm, Communicator):
            rule = "it must be a Communicator"
            raise ConfigError(explain("comm", type(comm).__name__, rule, "Pass mesh.pp"))
        self.schedule: PipelineSchedule = arrange(comm, stages, schedule, microbatches, chunks)
        self.microbatches = int(microbatches)
        self.stages = build(comm, stages, self.schedule.held(comm.rank))
        self.comm, self._link = comm, _link_of(comm)
        own = {number: Stage(number, module) for number, module in self.stages.items()}
        leaves = {id(p): p for module in self.stages.values() for p in leaves_of(module)}
        self._tied = TiedGradients(self._link, list(leaves.values()))
        self._executor = Executor(self.schedule, self._link, own, self._tied, on_stage_done)
        self._open: Pass | None = None  # after forward, before backward
        self._broken: BaseException | None = None

    # -- what users call -------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None, loss_fn: Loss | None = None) -> float:
        """Collective: run all micro-batches forward and backward; return the loss, on every rank.

        inputs: an array or a tuple of arrays with the rows of the batch along dimension 0; needed
        on the rank of the first stage, which is called with a part of each.  targets: likewise, on
        the rank of the last stage.  Others may pass None.
        loss_fn(output, *targets): a Tensor of one element for a micro-batch, on the last stage.
        The losses of the micro-batches are ADDED, and so are the gradients in `.grad`.  So that
        they are those of the whole batch, a loss is a sum of terms; for a mean, divide by the
        number of the whole batch:

            loss_fn = lambda y, t: functional.cross_entropy(y, t, reduction="sum") / total

        Under `no_grad` it runs the forward passes only.  In a block of `rng.at` a micro-batch drops
        what its rows drop in the whole batch.

        Raises on every rank ConfigError for missing inputs, targets or loss_fn, and for fewer rows
        than micro-batches; BufferMismatchError for unequal numbers of rows.
        """
        fault: MpiparError | None = None
        if self.comm.rank == self._ends[1] and not callable(loss_fn):
            rule, fix = "the rank of the last stage must have it", "Pass a function(output, target)"
            fault = ConfigError(explain("loss_fn", loss_fn, rule, fix))
        going = self._begin(inputs, targets, loss_fn or _no_loss, fault)
        self._run(going, FORWARD + BACKWARD if is_grad_enabled() else FORWARD)
        losses = [float(loss.item()) for _, loss in sorted(going.results.items())]
        total = np.array([sum(losses)], np.float64)
        return float((self._link.all_reduce(total) if self._link.size > 1 else total)[0])

    def forward(self, inputs: Any = None) -> Array | None:
        """Collective: run the forward passes; return the output of the whole batch.

        It is an array on the rank of the last stage, None elsewhere.  inputs: as for `step`.  What
        `backward` needs is kept until then, or until the next forward or step, unless this is
        called under `no_grad`.
        """
        going = self._begin(inputs, None, None)
        self._run(going, FORWARD)
        self._open = going if is_grad_enabled() else None
        if self.comm.rank != self._ends[1]:
            return None
        parts = [part for _, part in sorted(going.results.items())]
        return module_of(parts[0]).concatenate(parts, axis=0)

    def backward(self, grad_outputs: Any = None) -> None:
        """Collective: run the backward passes of the latest `forward`; leaves gradients.

        grad_outputs: the gradient of the output (or a Tensor of it), of its shape; needed on the
        rank of the last stage.  The scalar whose gradient it is must be one of the whole batch.

        Raises on every rank StateError without a forward, BufferMismatchError for another shape.
        """
        fault: MpiparError | None = None
        going, self._open = self._open, None
        if going is None:
            rule, fix = "it comes after forward, once", "Call forward first, with gradients on"
            raise StateError(explain("backward", "no forward", rule, fix))
        grad = getattr(grad_outputs, "data", grad_outputs)
        if self.comm.rank == self._ends[1]:
            fault = self._spread(going, grad)
        exchange(self._link, (), fault or self._fault())
        self._run(going, BACKWARD)

    def gather_timeline(self, messages: bool = False) -> Timeline:
        """Collective: return when each rank ran what in the latest step (see `timeline`).

        messages: with what each rank itself spent on starting to send and to receive.
        """
        return self._executor.recorder.gather(self._link, messages)

    @property
    def executed(self) -> tuple[Action, ...]:
        """The actions of this rank in the latest step, in the order in which they ran."""
        return tuple(a for a in self._executor.recorder.actions if a.computes)

    @property
    def tied(self) -> tuple[str, ...]:
        """The names of parameters of this rank that other stages hold too."""
        return self._tied.names

    @property
    def peak_live(self) -> int:
        """The most activations (micro-batches times stages) held here at a time in that step."""
        return self._executor.peak_live

    def destroy(self) -> None:
        """Collective: free the communicators; twice is harmless.  The modules stay."""
        self._tied.destroy()
        if self._link is not self.comm:
            self._link.destroy()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error the other ranks may never come to free them
            self.destroy()

    # -- the modules of this rank ------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, parameter) of this rank's stages, each parameter once.

        Names are those of the whole model for stages that know them (`models.stages`), else the
        number of the stage comes first: `2.weight`.
        """
        seen: set[int] = set()
        for number, module in self.stages.items():
            whole = getattr(module, "names_of_whole", False)
            for name, param in module.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield (name if whole else f"{number}.{name}"), param

    def parameters(self) -> list[Any]:
        """Return the parameters of this rank's stages, each once."""
        return [param for _, param in self.named_parameters()]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in self.parameters():
            param.grad = None

    def train(self, mode: bool = True) -> "Pipeline":
        """Set `training` in this rank's stages; returns self."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def eval(self) -> "Pipeline":
        """Unset `training` in this rank's stages; returns self."""
        return self.train(False)

    # -- a step ------------------------------------------------------------------------------------

    @property
    def _ends(self) -> tuple[int, int]:
        """The ranks of the first and of the last stage."""
        return self.schedule.placement[0], self.schedule.placement[-1]

    def _begin(
        self, inputs: Any, targets: Any, loss_fn: Loss | None, fault: MpiparError | None = None
    ) -> Pass:
        """Agree on the batch with the other ranks."""
        self._open = None
        settings = self.microbatches, loss_fn is not None, fault or self._fault()
        batch = cut(self._link, inputs, targets, self._ends, *settings)
        self._executor.begin(batch)
        return Pass(batch, loss_fn)

    def _run(self, going: Pass, kinds: tuple[str, ...]) -> None:
        try:
            self._executor.run(going, kinds)
        except BaseException as error:
            self._broken = error
            self._executor.forget()
            raise

    def _fault(self) -> MpiparError | None:
        if self._broken is not None:
            what = f"{type(self._broken).__name__}: {self._broken}"
            rule = f"it cannot go on after an error in an earlier step ({what})"
            return StateError(explain("pipeline", self.schedule.name, rule, "Make a new one"))
        return self._tied.fault() if is_grad_enabled() else None

    def _spread(self, going: Pass, grad: Any) -> MpiparError | None:
        """Lay the gradients of the outputs ready; return what is wrong with them."""
        outputs = [part for _, part in sorted(going.results.items())]
        shape = (sum(going.batch.sizes), *outputs[0].shape[1:])
        if grad is None or tuple(np.shape(grad)) != shape:
            given = None if grad is None else tuple(np.shape(grad))
            rule = f"it must be that of the output, {shape}"
            return BufferMismatchError(explain("grad_outputs.shape", given, rule, "Pass that"))
        grad = module_of(outputs[0]).asarray(grad, dtype=outputs[0].dtype)
        last = self.schedule.stages - 1
        for k in range(self.microbatches):
            going.values["B", last, k] = going.batch.part((grad,), k)[0]
        return None


def _link_of(comm: Communicator) -> Communicator:
    """Collective: return a communicator of the same ranks, for the pipeline's own messages."""
    if comm.size == 1:
        return comm
    group = comm.process_group
    how: dict[str, Any] = {"reproducible": group.reproducible, "timeout": group.timeout}
    return Communicator(group.raw, comm.device, f"pipeline of {comm.name}", **how)


def _no_loss(*_: Any) -> Any:
    """Stand for the loss on ranks without the last stage."""
    raise AssertionError("only the last stage has a loss")
