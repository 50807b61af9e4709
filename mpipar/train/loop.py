"""The training loop over a mesh of data-parallel (dp) times tensor-parallel (tp) ranks.

One step on four ranks, dp = 2, tp = 2, global batch of 8 sequences:

    dp 0   tp 0, tp 1   sequences 0..3   loss sum ─┐               ┌─ same gradients, same norm,
    dp 1   tp 0, tp 1   sequences 4..7   loss sum ─┴─ sum over dp ─┴─ same step of the optimiser

The loss is replicated over tp and a partial sum over dp.  `token_mean` divides it once, by the
number of valid tokens of the global batch; the gradients, summed over dp while backward still runs,
are those of one process with the whole batch.  Never a mean of means, so ranks may have unequal
numbers of sequences (8 on 3 ranks are 3, 3, 2) and micro-batches unequal numbers of tokens.

Which sequences, weights and dropout masks there are depends on seed, step and global index only.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar import models, partition, rng
from mpipar.autograd import no_grad
from mpipar.errors import NonFiniteError, explain
from mpipar.models.transformer import IGNORE
from mpipar.nn import Module
from mpipar.optim import AdamW, cosine
from mpipar.parallel.clip import clip_factor, clip_grad_norm
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh
from mpipar.train import launch
from mpipar.train.agree import mark, raise_first, same, together
from mpipar.train.config import TrainConfig
from mpipar.train.data import Batches, Corpus, Rows, load
from mpipar.train.peak import matmul_rate
from mpipar.train.report import Facts, Guarded, Report, Row

if TYPE_CHECKING:
    from mpi4py import MPI

PROMPT = 32  # tokens that the sample starts from
TEMPERATURE = 0.8


def train(config: TrainConfig, world: "MPI.Intracomm", report: Report | None = None) -> list[Row]:
    """Collective: train on all ranks of `world` and return the lines of the log, on every rank.

    `report` is told of everything as it happens; pass one on rank 0 only.

    Raises on every rank together: ConfigError for settings or data that cannot work, MismatchError
    if the ranks have different ones, NonFiniteError for a loss or gradient that is NaN or infinite.
    """
    report = report or Report()
    guarded = Guarded(report)
    same(world, "the configuration", config.fingerprint(), "Start all ranks with the same flags.")
    together(world, lambda: config.validate(world.size, launch.command))
    corpus = together(
        world,
        lambda: load(config.data, config.seq, config.vocab, world.rank, world.size),
    )
    same(world, "the training data", corpus.fingerprint(), "Give all ranks the same files.")
    together(world, report.open)  # files are emptied only now
    options = {"reproducible": config.reproducible, "check": config.check_collectives}
    with Mesh(world, dp=config.dp, tp=config.tp, device=config.device, **options) as mesh:
        return fit(config, mesh, corpus, guarded)


def fit(config: TrainConfig, mesh: Mesh, corpus: Corpus, report: Guarded) -> list[Row]:
    """Collective: build the model and run all steps; return the lines of the log."""
    model = models.build(config.model_config(), **factories(mesh))
    decay = config.weight_decay
    optimizer = AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=decay)
    place = {"part": mesh.dp.rank, "parts": mesh.dp.size}
    batches = Batches(corpus, config.seq, config.batch, config.seed, **place)
    facts = measure(config, mesh, corpus, model)
    replica = DataParallel(model, mesh.dp, op="sum")
    report.begin(facts)
    rows: list[Row] = []
    for step in range(1, config.steps + 1):
        optimizer.lr = learning_rate(config, step)
        start, waited = time.perf_counter(), comm_seconds(mesh)
        parts = batches.step(step, config.accumulate)
        loss, norm, tokens = train_step(
            step, parts, replica, optimizer, mesh, config.clip, report.failure
        )
        speed = tokens / (time.perf_counter() - start)
        row: Row = {
            "step": step,
            "loss": loss,
            "lr": optimizer.lr,
            "grad_norm": norm,
            "tokens_per_s": speed,
            "mfu": speed * facts.flops_per_token / facts.peak,
            "comm_s": comm_seconds(mesh) - waited,
        }
        rows.append(row)
        report.step(row)
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            rows.append({"step": step, "val_loss": evaluate(model, batches, config, mesh)})
            report.validation(rows[-1])
    report.end(sample(model, corpus, config, mesh))
    require_told(report.failure, mesh)
    replica.destroy()
    return rows


def train_step(
    step: int,
    parts: Sequence[Rows],
    replica: DataParallel,
    optimizer: AdamW,
    mesh: Mesh,
    clip: float,
    failure: str = "",
) -> tuple[float, float, int]:
    """Take one step over this rank's micro-batches; `replica` sums gradients over mesh.dp.

    Returns the mean loss of the global batch, the norm of its gradient before clipping, and its
    number of valid tokens.  Raises NonFiniteError on every rank if either is NaN or infinite, and
    ConfigError if `failure`, what went wrong with this rank's report, is not empty on any.
    """
    tokens = count_tokens(parts, mesh)
    optimizer.zero_grad()
    loss = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # require_finite is the judge
        for number, rows in enumerate(parts, 1):
            sync = nullcontext() if number == len(parts) else replica.no_sync()
            with rng.at(step, rows.first), sync:
                loss_sum, count = replica.loss(rows.inputs, rows.targets)
                share = token_mean(loss_sum, count, mesh.dp, total=tokens)
                share.backward()
            loss += float(share.item())  # the same on every rank
        norm = clip_grad_norm(replica.parameters(), None, mesh)
    require_finite(step, loss, norm, mesh, failure)
    optimizer.step(clip_factor(norm, clip) if clip else 1.0)
    return loss, norm, tokens


def count_tokens(parts: Sequence[Rows], mesh: Mesh) -> int:
    """Return the number of valid targets in the global batch."""
    mine = sum(np.count_nonzero(rows.targets != IGNORE) for rows in parts)
    return int(mesh.dp.all_reduce(np.array([mine], np.int64))[0])


def require_finite(step: int, loss: float, norm: float, mesh: Mesh, failure: str = "") -> None:
    """Raise NonFiniteError on every rank if the loss or the norm is not finite on any.

    Raises ConfigError on every rank if `failure` is not empty on any.
    """
    bad = np.array([not math.isfinite(loss), not math.isfinite(norm), failure != ""], np.int32)
    bad = mesh.world.all_reduce(bad, op="max")
    if bad[2]:
        require_told(failure, mesh)
    if bad.any():
        name, value = ("loss", loss) if bad[0] else ("grad_norm", norm)
        fix = "Try a lower --lr, a longer --warmup, or --clip 1"
        raise mark(NonFiniteError(explain(name, value, f"it is not finite in step {step}", fix)))


def require_told(failure: str, mesh: Mesh) -> None:
    """Raise ConfigError on every rank if a report failed on any."""
    raise_first(mesh.world.process_group.raw.allgather(("ConfigError", failure)))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step (from 1): linear warm-up, then half a cosine."""
    return cosine(step - 1, config.steps, config.lr, config.warmup_steps, config.lowest_lr)


@no_grad()
def evaluate(model: Any, batches: Batches, config: TrainConfig, mesh: Mesh) -> float:
    """Return the mean loss over the held-out sequences, the same on every rank."""
    model.eval()
    sums = np.zeros(2)
    for rows in batches.held_out(config.eval_batches):
        loss_sum, count = model.loss(rows.inputs, rows.targets)
        sums += float(loss_sum.item()), count
    model.train()
    loss_sum, count = mesh.dp.all_reduce(sums)
    return float(loss_sum / count)


def sample(model: Any, corpus: Corpus, config: TrainConfig, mesh: Mesh) -> str:
    """Return what the model writes after the first held-out tokens, and those before it.

    The ranks of the first data-parallel coordinate write, the others wait.
    """
    text = ""
    if config.sample and mesh.dp.rank == 0:
        sizes = partition.blocks(config.vocab, mesh.tp.size)
        gather = partial(mesh.tp.all_gather, sizes=sizes)
        prompt = np.asarray(corpus.held_out[: min(PROMPT, config.seq // 2) or 1], np.int64)
        settings: dict[str, Any] = {"temperature": TEMPERATURE, "gather": gather}
        written = models.generate(model, prompt, config.sample, seed=config.seed, **settings)
        tokens = np.concatenate([prompt, written])
        text = readable(tokens) if corpus.is_text else " ".join(map(str, tokens))
    mesh.world.barrier()
    return text


def readable(tokens: np.ndarray) -> str:
    """Return bytes as text, with a mark for what is none or would upset a terminal."""
    text = bytes(tokens.clip(0, 255).astype(np.uint8)).decode("utf-8", "replace")
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{MIDDLE DOT}" for char in text
    )


def comm_seconds(mesh: Mesh) -> float:
    """Return the seconds that this rank has spent in calls of the mesh's communicators so far."""
    return sum(comm.seconds for comm in {id(c): c for c in (mesh.world, mesh.dp, mesh.tp)}.values())


def measure(config: TrainConfig, mesh: Mesh, corpus: Corpus, model: Any) -> Facts:
    """Collective: return what is to be said of the run before its first step."""
    mesh.world.barrier()  # all ranks measure at the same time
    peak = float(mesh.world.all_reduce(np.array([matmul_rate(config.dtype)]))[0])
    return Facts(
        parameters=count_parameters(model),
        peak=peak,
        flops_per_token=model.flops_per_token(config.seq),
        dp=mesh.dp.size,
        tp=mesh.tp.size,
        corpus=corpus,
    )


def count_parameters(model: Module) -> int:
    """Return the parameters of the whole model, whatever part of them this rank holds."""
    return sum(math.prod(param.spec.shape) for param in model.parameters())
