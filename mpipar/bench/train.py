"""`mpipar bench train`: steps of our trainer beside PyTorch's, in turns, in one run.

    each rank    peer   ours   alone   rate    peer   ours   alone   rate    ...
                 steps  steps  steps   of products

"ours" is DataParallel or FSDP over the ranks.  "peer" is PyTorch (`torch_gpt.py`), asleep while it
is not its turn.  "alone" is the same local batch on a model of each rank's own without
communication, on all ranks at once, so that clocks and memory are as busy: what communication and
sharding add to it is `overhead`.  "rate" is the best of the step's own matrix products.

All ranks begin each step together and the slowest one counts; of a turn's steps, and of the turns,
the medians.  `ratio` and `overhead` are medians of what each turn shows by itself: a machine whose
speed swings for seconds slows down both sides of a turn.  MFU: 6 N + 6 L s d operations a token
(`flops_per_token`) over that rate.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpipar import models
from mpipar.bench import gloo
from mpipar.bench.torch_gpt import peak_mb
from mpipar.bench.train_memory import forget_peak
from mpipar.bench.train_peer import Peer
from mpipar.bench.train_settings import Mode, Train, operations
from mpipar.errors import MismatchError
from mpipar.kernels.matmul.blas import product
from mpipar.kernels.native import compile_cpu
from mpipar.optim import AdamW
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.fsdp import FSDP
from mpipar.train import heap
from mpipar.train.agree import together

WARM = 10  # steps before the first turn of each side: PyTorch takes that long to its usual speed
RATE_SECONDS = 0.02  # for a shape in a turn

Step = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Row:
    """One mode, as it is written to JSON; tokens a second are those of all ranks together."""

    mode: str
    ranks: int
    dim: int
    tokens_per_s: float
    peer_tokens_per_s: float | None
    ratio: float | None
    mfu: float
    rss_mb: float
    peer_rss_mb: float | None
    rss_ratio: float | None
    single_tokens_per_s: float
    overhead: float
    peer_mfu: float | None
    matmul_gflops: float
    step_s: float
    peer_step_s: float | None
    single_step_s: float
    layers: int
    heads: int
    seq: int
    batch: int
    vocab: int
    threads: int


@dataclass
class Turns:
    """The median step of every turn of each side, and the rates, in seconds and operations."""

    ours: list[float]
    peer: list[float]
    alone: list[float]
    rates: list[float]
    rss_mb: float = 0.0
    peer_rss_mb: float = 0.0


def measure(config: Train, comm: Communicator, mode: Mode) -> Row:
    """Collective: measure one mode.

    Raises ConfigError on every rank if a peer fails, MismatchError if its model is another one.
    """
    heap.keep_freed()  # as in training
    together(comm.process_group.raw, compile_cpu)
    with ExitStack() as stack:
        peer = _peer(config, comm, mode, stack) if config.peer else None
        forget_peak()
        step, count = _ours(config, comm, mode, stack)
        if peer is not None:
            together(comm.process_group.raw, lambda: _same_model(count, peer.parameters()))
        return _row(config, comm.size, mode, _turns(config, comm, step, peer))


def _turns(config: Train, comm: Communicator, step: Step, peer: Peer | None) -> Turns:
    """Let all sides take their turns."""
    raw, turns = comm.process_group.raw, Turns([], [], [], [])
    numbers = np.random.default_rng((config.seed, comm.rank))
    _timed(comm, config, step, numbers, WARM)
    if peer is not None:
        together(raw, lambda: peer.run(WARM))
    alone: Step | None = None
    for _ in range(config.repeats):
        if peer is not None:
            answer = together(raw, lambda: peer.run(config.steps))
            turns.peer.append(_slowest(comm, answer.seconds))
            turns.peer_rss_mb = _largest(comm, answer.rss_mb)
        turns.ours.append(_timed(comm, config, step, numbers, config.steps))
        if alone is None:  # made after memory was measured, which it would add to
            turns.rss_mb = _largest(comm, peak_mb())
            alone = _alone(config)
            _timed(comm, config, alone, numbers, WARM)
        turns.alone.append(_timed(comm, config, alone, numbers, config.steps))
        comm.barrier()
        best = max(_rate(shape) for shape in set(config.products()))
        turns.rates.append(float(comm.all_reduce(np.array([best]), "mean")[0]))
    return turns


def _row(config: Train, ranks: int, mode: Mode, turns: Turns) -> Row:
    """Return what the turns come to."""
    ours, alone = statistics.median(turns.ours), statistics.median(turns.alone)
    peer = statistics.median(turns.peer) if turns.peer else None
    tokens, rate = ranks * config.tokens, max(turns.rates)
    work = config.tokens * models.build(config.model()).flops_per_token(config.seq)
    return Row(
        mode=mode,
        ranks=ranks,
        dim=config.dim,
        tokens_per_s=tokens / ours,
        peer_tokens_per_s=tokens / peer if peer else None,
        ratio=paired(turns.peer, turns.ours) if peer else None,
        mfu=work / ours / rate,
        rss_mb=turns.rss_mb,
        peer_rss_mb=turns.peer_rss_mb if peer else None,
        rss_ratio=turns.rss_mb / turns.peer_rss_mb if peer else None,
        single_tokens_per_s=tokens / alone,
        overhead=paired(turns.ours, turns.alone) - 1,
        peer_mfu=work / peer / rate if peer else None,
        matmul_gflops=rate / 1e9,
        step_s=ours,
        peer_step_s=peer,
        single_step_s=alone,
        layers=config.layers,
        heads=config.heads,
        seq=config.seq,
        batch=config.batch,
        vocab=config.vocab,
        threads=config.threads,
    )


def paired(above: list[float], below: list[float]) -> float:
    """Return the median of the turns' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain dicts."""
    return [asdict(row) for row in rows]


# -- the sides -----------------------------------------------------------------------------------


def _ours(config: Train, comm: Communicator, mode: Mode, stack: ExitStack) -> tuple[Step, int]:
    """Collective: return our training step, and the number of the model's parameters."""
    module = models.build(config.model())
    count = sum(parameter.data.size for parameter in module.parameters())
    if mode == "ddp":
        replica = stack.enter_context(DataParallel(module, comm))
        return _step_of(replica, AdamW(replica.parameters(), 3e-4, weight_decay=0.1)), count
    sharded = stack.enter_context(FSDP(module, comm))
    return _step_of(sharded, AdamW(sharded.parameters(), 3e-4, weight_decay=0.1)), count


def _alone(config: Train) -> Step:
    """Return a training step without communication."""
    module = models.build(config.model())
    return _step_of(module, AdamW(module.parameters(), 3e-4, weight_decay=0.1))


def _step_of(model: Any, optimizer: AdamW) -> Step:
    """Return a step of the mean loss over this rank's tokens (B, S)."""

    def step(tokens: np.ndarray, targets: np.ndarray) -> None:
        model.zero_grad()
        total, count = model.loss(tokens, targets)
        (total / count).backward()
        optimizer.step()

    return step


def _peer(config: Train, comm: Communicator, mode: Mode, stack: ExitStack) -> Peer:
    """Collective: start the peers; they wait for each other."""
    sizes = ("layers", "dim", "heads", "seq", "batch", "vocab", "threads", "seed")
    settings = {name: getattr(config, name) for name in sizes}
    settings |= {"mode": mode, "rank": comm.rank, "ranks": comm.size}
    settings["address"] = gloo.meeting_point(comm.process_group.raw)
    return stack.enter_context(Peer(settings))


def _same_model(ours: int, peers: int) -> None:
    """Raise MismatchError if the peer does not train as many parameters."""
    if ours != peers:
        raise MismatchError(f"our model has {ours} parameters, the peer's {peers}: not the same")


# -- the clock -----------------------------------------------------------------------------------


def _timed(
    comm: Communicator, config: Train, step: Step, numbers: np.random.Generator, steps: int
) -> float:
    """Collective: take steps on random tokens; return the median seconds of the slowest rank."""
    seconds = []
    for _ in range(steps):
        tokens = numbers.integers(0, config.vocab, (config.batch, config.seq))
        targets = np.roll(tokens, -1, 1)
        comm.barrier()
        start = time.perf_counter()
        step(tokens, targets)
        seconds.append(time.perf_counter() - start)
    return _slowest(comm, seconds)


def _slowest(comm: Communicator, seconds: list[float]) -> float:
    """Collective: return the median over the steps of the slowest rank's seconds."""
    return float(np.median(comm.all_reduce(np.array(seconds), "max")))


def _largest(comm: Communicator, value: float) -> float:
    """Collective: return the largest value of any rank."""
    return float(comm.all_reduce(np.array([value]), "max")[0])


def _rate(shape: tuple[int, int, int]) -> float:
    """Return this rank's operations a second in a product (n, k) x (k, m) of float32."""
    n, k, m = shape
    a, b, out = np.ones((n, k), np.float32), np.ones((k, m), np.float32), None
    out = product(a, b)  # wakes up the library and touches the pages
    best, end = 0.0, time.perf_counter() + RATE_SECONDS
    while True:
        start = time.perf_counter()
        product(a, b, out)
        now = time.perf_counter()
        best = max(best, operations(shape) / (now - start))
        if now > end:
            return best
