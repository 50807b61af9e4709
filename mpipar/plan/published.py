"""The formulas that others have published, to compare with: they are not how plans are made.

P parameters, n ranks that shard, t tensor-parallel ranks, p pipeline ranks, m micro-batches,
v stages on a rank, s sequence, b sequences of a micro-batch, h width.  Sizes are bytes.
"""

from mpipar.errors import ConfigError, explain

# Megatron's distributed optimiser: bytes a parameter that stay, and that are shared out over n
DISTRIBUTED = {"float32": (8.0, 8.0), "bfloat16": (6.0, 12.0), "float16": (4.0, 16.0)}


def distributed_optimizer(dtype: str, n: int) -> float:
    """Return the bytes a parameter of training with a distributed optimiser (Megatron's guide).

    float32 8 + 8/n; bfloat16 with float32 gradients 6 + 12/n; float16 4 + 16/n.
    Raises ConfigError for another dtype.
    """
    if dtype not in DISTRIBUTED:
        rule = f"it is one of {', '.join(DISTRIBUTED)}"
        raise ConfigError(explain("dtype", dtype, rule, "Choose one of them"))
    stays, shared = DISTRIBUTED[dtype]
    return stays + shared / n


def zero(
    stage: int, parameters: float, n: int, largest_layer: float = 0.0, offload: str = "none"
) -> float:
    """Return the bytes that ZeRO keeps on a GPU (DeepSpeed's memory page), 16-bit training.

    Stage 2: 4 P + 16 P / n, with the optimiser on the host 2 P.  Stage 3, of whose layers the
    largest has L parameters: 4 L + 18 P / n; optimiser on the host 4 L + 2 P / n; all there 4 L.
    offload: "none", "optimizer" or "all".  Raises ConfigError for what they do not state.
    """
    P, L = parameters, largest_layer
    stated = {
        (2, "none"): 4 * P + 16 * P / n,
        (2, "optimizer"): 2 * P,
        (3, "none"): 4 * L + 18 * P / n,
        (3, "optimizer"): 4 * L + 2 * P / n,
        (3, "all"): 4 * L,
    }
    if (stage, offload) not in stated:
        rule = f"(stage, offload) is one of {', '.join(map(str, stated))}"
        raise ConfigError(explain("(stage, offload)", (stage, offload), rule, "Choose one"))
    return stated[stage, offload]


def megatron_activations(
    s: int, b: int, h: int, t: int = 1, ffn: int | None = None, sequence_parallel: bool = False
) -> float:
    """Return the bytes of a layer's activations in 16 bits (Korthikanti et al. 2022).

    With sequence parallelism s b h (18 + 4 ffn/h) / t, without it s b h (10 + 24/t), where ffn is
    4 h.  Attention scores are not kept.
    """
    ffn = 4 * h if ffn is None else ffn
    if sequence_parallel:
        return s * b * h * (18 + 4 * ffn / h) / t
    return s * b * h * (10 + 24 / t)


def interleaving_factor(p: int, v: int) -> float:
    """Return by what interleaving multiplies the activations in flight: 1 + (p-1)/(p v)."""
    return 1 + (p - 1) / (p * v)


def bubble(schedule: str, p: int, m: int, v: int = 1) -> float:
    """Return the idle share of the makespan, all of F, B and W equal.

    gpipe and 1f1b (p-1)/(m+p-1); interleaved (p-1)/(v m+p-1), p divides m; zb1p (p-1)/(3m+p-1),
    m >= 2p.  Raises ConfigError for another schedule.
    """
    work = {"gpipe": m, "1f1b": m, "interleaved": v * m, "zb1p": 3 * m}
    if schedule not in work:
        rule = f"the bubble is stated of {', '.join(work)}"
        raise ConfigError(explain("schedule", schedule, rule, "Simulate others"))
    return (p - 1) / (work[schedule] + p - 1)


def ring_all_reduce(nbytes: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring all_reduce: S 2(n-1)/(n B) + 2(n-1) alpha."""
    return 2 * (n - 1) * (nbytes / (n * bandwidth) + latency)


def ulysses_volume(s: int, h: int, p: int) -> float:
    """Return the elements a rank trades for one layer: q, k, v and the output, 4 s h / p."""
    return 4 * s * h / p
