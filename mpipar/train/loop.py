"""The training loop over a mesh of pp x dp x cp x tp ranks.

One step on four ranks, dp = 2, tp = 2, global batch of 8 sequences:

    dp 0   tp 0, tp 1   sequences 0..3   loss sum ─┐               ┌─ same gradients, same norm,
    dp 1   tp 0, tp 1   sequences 4..7   loss sum ─┴─ sum over dp ─┴─ same step of the optimiser

A rank's loss is that of its own tokens: its sequences (dp), or its part of each (cp); it is
replicated over tp, and lies on the last stage of pp.  It is divided once, by the number of valid
tokens of the global batch; the gradients, summed over dp and cp while backward still runs, are
those of one process with the whole batch.  Never a mean of means, so ranks may have unequal
numbers of sequences (8 on 3 ranks are 3, 3, 2) and micro-batches unequal numbers of tokens.

Which sequences, weights and dropout masks there are depends on seed, step and global index only.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm import clock, survive
from mpipar.comm.choice import read_table, table_path
from mpipar.kernels import native
from mpipar.models.transformer import IGNORE
from mpipar.optim import AdamW, cosine
from mpipar.parallel.context.layout import context_positions
from mpipar.parallel.mesh import Mesh
from mpipar.trace.record import phase
from mpipar.train import launch
from mpipar.train.agree import same, together
from mpipar.train.checkpoints import Checkpoints
from mpipar.train.config import TrainConfig
from mpipar.train.data import Batches, Corpus, load
from mpipar.train.elastic import Course, require_support
from mpipar.train.held import Held, hold
from mpipar.train.initial import adopted, begin, tokenizer
from mpipar.train.peak import matmul_rate, matmul_rate_now
from mpipar.train.report import Facts, Guarded, Report, Row
from mpipar.train.sample import sample
from mpipar.train.signals import Signals, name_of
from mpipar.train.step import require_told, train_step
from mpipar.train.tracing import traced, untraced

if TYPE_CHECKING:
    from mpi4py import MPI


def train(
    config: TrainConfig,
    world: "MPI.Intracomm",
    report: Report | None = None,
    signals: Signals | None = None,
    heir: Callable[[], Report] = Report,
) -> list[Row]:
    """Collective: train on all ranks of `world` and return the lines of the log, on every rank.

    `report` is told of everything as it happens; pass one on rank 0 only.  `signals` on any rank
    may ask for a stop: the run then saves, if it does, and returns early.
    `heir` makes the report of a rank that becomes the first because others have died (--elastic).

    Raises on every rank together: ConfigError for settings or data that cannot work, MismatchError
    if the ranks have different ones, NonFiniteError if too many steps in a row have a loss or
    gradient that is NaN or infinite.
    """
    report = report or Report()
    guarded = Guarded(report)
    together(world, lambda: read_table(table_path()))
    same(world, "the configuration", config.fingerprint(), "Start all ranks with the same flags.")
    config = together(world, lambda: adopted(config))
    together(world, lambda: config.validate(world.size, launch.command))
    loops = together(world, native.compile_cpu)
    what, fix = "the use of loops in machine code", f"Give all ranks the same {native.SWITCH}."
    same(world, what, str(loops), fix)
    corpus = together(
        world,
        lambda: load(
            *(config.data, config.seq, config.vocab, world.rank, world.size),
            *(tokenizer(config), config.init),
        ),
    )
    same(world, "the training data", corpus.fingerprint(), "Give all ranks the same files.")
    options: dict[str, Any] = {"device": config.device, "reproducible": config.reproducible}
    options |= {"check": config.check_collectives, "timeout": config.timeout}
    sizes = config.pp, config.dp, config.cp, config.tp, config.ep
    signals = signals or Signals()
    if not config.elastic:
        together(world, report.open)  # files are emptied only now
        with Mesh(world, *sizes, **options) as mesh, traced(config, mesh, guarded) as traced_step:
            return fit(config, mesh, corpus, guarded, signals, Course(world), traced_step)
    together(world, lambda: require_support(world.size))
    survive.end_in_time()
    course = Course(world.Dup())
    while True:
        try:
            together(course.world, guarded.report.open)
            with Mesh(course.world, *sizes, **options) as mesh:
                return fit(config, mesh, corpus, guarded, signals, course)
        except Exception as error:
            trouble = error
        left = course.recover(trouble, config)
        guarded.report.close()
        if left is None:
            return course.rows
        config, sizes = left, (left.pp, left.dp, left.cp, left.tp, left.ep)
        guarded = Guarded(heir() if course.world.rank == 0 else Report())


def fit(
    config: TrainConfig,
    mesh: Mesh,
    corpus: Corpus,
    report: Guarded,
    signals: Signals,
    course: Course,
    traced_step: Callable[[int], AbstractContextManager[None]] = untraced,
) -> list[Row]:
    """Collective: build the model and run all steps; return the lines of the log."""
    held = hold(config, mesh)
    begin(held, config, mesh)
    decay = config.weight_decay
    optimizer = AdamW(held.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=decay)
    own = context_positions(config.seq, mesh.cp.size, mesh.cp.rank, config.layout)
    place: dict[str, Any] = {"part": mesh.dp.rank, "parts": mesh.dp.size, "positions": own}
    streak, goes_on = course.streak, course.done >= 0
    streak.most = config.max_skipped
    checkpoints = Checkpoints(config, mesh, held, optimizer, streak)
    first = course.begin(mesh, held, optimizer, lambda: checkpoints.resume(goes_on)) + 1
    batches = Batches(corpus, config.seq, config.batch, config.seed, **place)
    facts = measure(config, mesh, corpus, held, first)
    report.begin(facts)
    rows, peak = course.rows, facts.peak
    if goes_on:
        checkpoints.after(course.done)  # the one that was being written may be lost
    step, asked = first - 1, signals.agree(mesh.world)
    while step < config.steps and not asked:
        step += 1
        optimizer.lr = learning_rate(config, step)
        start, waited = time.perf_counter(), clock.seconds()
        with traced_step(step):
            with phase("data"):
                parts = batches.step(step, 1 if config.pp > 1 else config.accumulate)
            told = report.failure, signals, course.commit if config.elastic else None
            taken = train_step(step, parts, held, optimizer, mesh, config.clip, *told)
        course.done = step
        speed, asked = taken.tokens / (time.perf_counter() - start), taken.asked
        row: Row = {
            "step": step,
            "loss": taken.loss,
            "lr": optimizer.lr,
            "grad_norm": taken.norm,
            "tokens_per_s": speed,
            "mfu": speed * facts.flops_per_token / peak,
            "comm_s": clock.seconds() - waited,
            "skipped": streak.after(taken),
        }
        rows.append(row)
        report.step(row)
        if streak.is_too_long:
            raise streak.error(step, taken, checkpoints.finish())
        due = step == config.steps or (config.eval_every and step % config.eval_every == 0)
        if due and not asked:
            with phase("validation"):
                value, asked = evaluate(held, batches, config, mesh, signals)
                if step < config.steps:
                    peak = max(peak, rate(config, mesh, matmul_rate_now))
            if not asked:
                rows.append({"step": step, "val_loss": value})
                report.validation(rows[-1])
        with phase("checkpoint"):
            checkpoints.after(step)
    if streak.in_row:
        report.note(streak.at_the_end(config.save))
    if asked:
        saved = checkpoints.stop(step)
        where = None if saved is None else str(saved)
        report.stopped({"step": step, "stopped": name_of(asked), "saved": where})
    else:
        checkpoints.finish()
        report.end(sample(held, corpus, config, mesh))
    require_told(report.failure, mesh)
    held.destroy()
    return rows


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step (from 1): linear warm-up, then half a cosine."""
    return cosine(step - 1, config.steps, config.lr, config.warmup_steps, config.lowest_lr)


def evaluate(
    held: Held, batches: Batches, config: TrainConfig, mesh: Mesh, signals: Signals
) -> tuple[float, int]:
    """Collective: return the mean loss over the held-out sequences, and 0.

    Or, after a signal, that of some of them, and its number.
    """
    held.eval()
    sums, asked = np.zeros(2), 0
    for rows in batches.held_out(config.eval_batches):
        sums += np.array([held.loss(rows), np.count_nonzero(rows.targets != IGNORE)])
        if asked := signals.agree(mesh.world):
            break
    held.train()
    loss_sum, count = held.data.all_reduce(sums)
    return float(loss_sum / count), asked


def measure(config: TrainConfig, mesh: Mesh, corpus: Corpus, held: Held, first: int) -> Facts:
    """Collective: return what is to be said of the run before its first step."""
    return Facts(
        parameters=held.count,
        peak=rate(config, mesh, matmul_rate),
        flops_per_token=held.flops_per_token,
        layout=layout(config, mesh),
        ranks=mesh.world.size,
        corpus=corpus,
        first=first,
    )


def rate(config: TrainConfig, mesh: Mesh, own: Callable[[str], float]) -> float:
    """Collective: return the operations a second of all ranks together in matrix products."""
    mesh.world.barrier()  # all ranks measure at the same time
    return float(mesh.world.all_reduce(np.array([own(config.dtype)]))[0])


def layout(config: TrainConfig, mesh: Mesh) -> str:
    """Return how the run is spread: the mesh, "dp 2 x tp 2", then what was chosen besides.

    Of the mesh: dp, tp, and every other axis above 1.
    """
    shown = [axis for axis in ("pp", "cp", "ep") if mesh.axis_size(axis) > 1]
    sizes = " x ".join(f"{axis} {mesh.axis_size(axis)}" for axis in ("dp", "tp", *shown))
    parts = config.through_pipeline(mesh.dp.size) if config.pp > 1 else config.accumulate
    micro = f"{parts} micro-batch{'es' * (parts > 1)}"
    chosen = {
        f"fsdp {config.fsdp}": config.fsdp != "none",
        f"schedule {config.order} of {micro}": config.pp > 1,
        micro: config.pp == 1 and parts > 1,
        f"cp layout {config.layout}": config.cp > 1,
        "sequence-parallel": config.sequence_parallel,
        "overlap": config.overlap,
        f"{config.experts} experts, {config.chosen} for a token": config.experts > 0,
        "recompute": config.recompute,
    }
    return ", ".join([sizes, *(text for text, is_so in chosen.items() if is_so)])
