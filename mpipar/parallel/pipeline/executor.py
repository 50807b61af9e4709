"""The executor: one rank walks down its row of the schedule, computes and posts messages.

    rank 1 of 2, 1F1B:   1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 ...

F and B take what they need from `values`, if a stage of this rank made it, or wait for the receive
that was posted before; what they make goes there, or to the send that is listed next.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mpipar.arrays import Array
from mpipar.autograd import add_pump
from mpipar.comm import waiting
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.batch import Batch
from mpipar.parallel.pipeline.messages import Messages
from mpipar.parallel.pipeline.stage import Loss, Stage
from mpipar.parallel.pipeline.tied import TiedGradients
from mpipar.parallel.pipeline.timeline import Recorder
from mpipar.schedule.pipeline import Action, PipelineSchedule, to_csv
from mpipar.trace import record

FORWARD = ("F", "SEND_F", "RECV_F")
BACKWARD = ("B", "W", "SEND_B", "RECV_B")


@dataclass
class Pass:
    """What is on its way through the stages of this rank in one step."""

    batch: Batch
    loss_fn: Loss | None
    values: dict[tuple[str, int, int], Array] = field(default_factory=dict)  # for F or B of a stage
    outgoing: dict[Action, Array] = field(default_factory=dict)  # by the send
    results: dict[int, Array] = field(default_factory=dict)  # losses or outputs, by micro-batch


class Executor:
    """Runs actions on the stages of this rank."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        comm: Communicator,
        stages: dict[int, Stage],
        tied: TiedGradients,
        on_stage_done: Callable[[int], object] | None,
    ) -> None:
        """Run a lowered schedule; `comm` has no other messages between two ranks."""
        self._schedule, self._comm, self._stages = schedule, comm, stages
        self._tied, self._on_stage_done = tied, on_stage_done
        self._last = "W" if schedule.split else "B"  # the kind that completes gradients
        self._messages = Messages(comm)
        for (
            stage
        ) in stages.values():  # FSDP: gradients that are split, or summed with others' first
            late = schedule.split or tied.holds(stage.leaves)
            stage.waits = late and hasattr(stage.module, "sync_gradients")
        self.recorder = Recorder(comm.process_group.flight)
        self.peak_live = 0

    def begin(self, batch: Batch) -> None:
        """Forget what was in flight, and start the clock of a step."""
        self.forget()
        self._messages.begin(batch.kind)
        self.recorder.begin()
        if record.to is not None:
            csv = lambda: to_csv(self._schedule.computation())  # noqa: E731
            record.to.pipeline(self.recorder.channel, self._schedule.name, csv)
        self.peak_live = 0

    def forget(self) -> None:
        """Drop all micro-batches in flight."""
        for stage in self._stages.values():
            stage.forget()

    def run(self, going: Pass, kinds: tuple[str, ...]) -> None:
        """Run this rank's actions of these kinds in the order of the schedule."""
        row = [a for a in self._schedule.actions[self._comm.rank] if a.kind in kinds]
        trains = self._last in kinds
        left = dict.fromkeys(self._stages, self._schedule.microbatches)  # that are not complete
        with _progress():
            if trains:
                self._tied.begin()
                for stage in self._stages.values():
                    stage.quiet()
            for action in row:
                if action.kind == self._last:
                    left[action.stage] -= 1
                    if not left[action.stage]:
                        self._stages[action.stage].loud()
                with _named(action, self._schedule.stages, self._comm):
                    self._do(action, going)
                    if action.kind == self._last and not left[action.stage]:
                        self._done(action.stage)
            self._messages.finish()
            if trains:
                self._tied.sum()
                for stage in self._stages.values():
                    stage.sync()

    def _done(self, stage: int) -> None:
        """Tell that the backward passes of a stage have ended."""
        if self._on_stage_done is not None:
            self._on_stage_done(stage)

    def _do(self, action: Action, going: Pass) -> None:
        match action.kind:
            case "F":
                self._forward(action, going)
            case "B":
                self._backward(action, going)
            case "W":
                start = self.recorder.now()
                self._stages[action.stage].weights(action.microbatch)
                self.recorder.add(action, start)
            case _:
                start = self.recorder.now()
                self._post(action, going)
                self.recorder.add(action, start)

    def _post(self, action: Action, going: Pass) -> None:
        """Start to send, or make ready to receive."""
        peer, rows = self._schedule.peer(action), going.batch.sizes[action.microbatch]
        match action.kind:
            case "SEND_F" | "SEND_B":
                self._messages.send(action, going.outgoing.pop(action), peer, rows)
            case "RECV_F":
                self._messages.receive(action, peer, rows)
            case "RECV_B":
                form = self._stages[action.stage].held[action.microbatch].form
                self._messages.receive_like(action, form, peer)

    def _forward(self, action: Action, going: Pass) -> None:
        number, _, k = action
        stage, batch = self._stages[number], going.batch
        is_last = number == self._schedule.stages - 1
        inputs = (self._taken(action, going),) if number else batch.part(batch.inputs, k)
        loss = None
        if is_last and going.loss_fn is not None:
            loss_fn, targets = going.loss_fn, batch.part(batch.targets, k)
            loss = lambda y: loss_fn(y, *targets)  # noqa: E731
        start = self.recorder.now()
        with batch.at(k):
            y = stage.forward(k, inputs, loss)
        self.recorder.add(action, start)
        self.peak_live = max(self.peak_live, sum(len(s.held) for s in self._stages.values()))
        if is_last:
            going.results[k] = y.data
        else:
            self._pass_on(action, number + 1, y.data, going)

    def _backward(self, action: Action, going: Pass) -> None:
        number, _, k = action
        ends = number == self._schedule.stages - 1 and going.loss_fn is not None
        grad = None if ends else self._taken(action, going)
        start = self.recorder.now()
        dx = self._stages[number].backward(k, grad, self._schedule.split)
        self.recorder.add(action, start)
        if dx is not None:
            self._pass_on(action, number - 1, dx, going)

    def _taken(self, action: Action, going: Pass) -> Array:
        """Return what a stage waits for: made on this rank, or received."""
        number, kind, k = action
        if (kind, number, k) in going.values:
            return going.values.pop((kind, number, k))
        receive = Action(number, f"RECV_{kind}", k)
        return self._messages.take(receive, self._schedule.peer(receive))

    def _pass_on(self, action: Action, target: int, x: Array, going: Pass) -> None:
        """Lay a result ready for a stage of this rank, or for its send."""
        ends = self._schedule.message(action)
        if ends is None:
            going.values[action.kind, target, action.microbatch] = x
        else:
            going.outgoing[ends[0]] = x


@contextmanager
def _progress() -> Iterator[None]:
    """Advance messages between the nodes of a backward."""
    pump = add_pump(waiting.progress)
    try:
        yield
    finally:
        pump.remove()


@contextmanager
def _named(action: Action, stages: int, comm: Communicator) -> Iterator[None]:
    """Say in every error which action it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"in {action} of the pipeline: stage {action.stage} of {stages}, "
            f"micro-batch {action.microbatch}, "
            f"rank {comm.rank} of {comm.size}"
        )
        raise
