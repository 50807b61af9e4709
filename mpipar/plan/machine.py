"""How fast a rank computes and how fast ranks talk: given, read from a file, or measured here.

The defaults are one core of a CPU server in float32 on a common cluster: 100 GFLOP/s in matrix
products, 35 in attention, 8 GB/s through what works element by element (each access counted), 10 us
for every operation, and the network of `schedule.network.CLUSTER`.  Measure, or state your own.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as as_dtype
from mpipar.errors import ConfigError, explain
from mpipar.kernels import attention as attention_kernel
from mpipar.kernels import gelu as gelu_kernel
from mpipar.kernels import layer_norm as layer_norm_kernel
from mpipar.kernels.matmul.blas import product
from mpipar.models.config import ModelConfig
from mpipar.schedule.network import CLUSTER, Network

SECONDS = 0.15  # that each of the measurements takes at least
TOKENS = 1024  # of what is measured, at most
SPREAD = 1 << 27  # bytes of operands that are used in turn, at most


@dataclass(frozen=True)
class Machine:
    """Speeds of one rank, in operations, bytes and seconds; see the module for the defaults."""

    flops: float = 100e9
    """Operations a second in matrix products."""
    attention_flops: float = 35e9
    """Operations a second in attention, of those that a causal mask leaves."""
    memory_bandwidth: float = 8e9
    """Bytes a second of element-by-element operations, every access counted."""
    overhead: float = 10e-6
    """Seconds that an operation costs beside its arithmetic."""
    alpha: float = CLUSTER.alpha
    """Seconds a message between nodes."""
    beta: float = CLUSTER.beta
    """Seconds a byte between nodes."""
    gamma: float = CLUSTER.gamma
    """Seconds a byte that is added."""
    alpha_intra: float = CLUSTER.alpha_intra
    """Seconds a message inside a node."""
    beta_intra: float = CLUSTER.beta_intra
    """Seconds a byte inside a node."""
    cores: float = 0.0
    """Cores of a node, which its ranks share, and which copy messages inside it; 0 for one a rank,
    and messages that travel beside its work."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a speed that is not positive or a time that is negative."""
        for name, value in asdict(self).items():
            speed = name in ("flops", "attention_flops", "memory_bandwidth")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(explain(name, value, "it is a number", "Pass a number"))
            if not 0 <= value < float("inf") or (speed and not value):
                rule = "a speed is above 0" if speed else "a time is not negative"
                raise ConfigError(explain(name, value, rule, "Pass a finite number"))

    def turns(self, ranks: int) -> float:
        """Return how many ranks of a node with so many share a core."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def network(self, nodes: tuple[int, ...], slower: float = 1.0, shared: bool = False) -> Network:
        """Return the network as `simulate` takes it; slower: of a byte between nodes."""
        return Network(
            alpha=self.alpha,
            beta=self.beta * slower,
            gamma=self.gamma,
            alpha_intra=self.alpha_intra,
            beta_intra=self.beta_intra,
            nodes=nodes,
            shared=shared,
        )


def read(path: Path) -> Machine:
    """Return the machine of a file that `write` wrote; what it leaves out has its default.

    Raises ConfigError if it is no such file.
    """
    known = {field.name for field in fields(Machine)}
    try:
        found = json.loads(path.read_text())
        extra = set(found) - known
    except (OSError, ValueError, TypeError):
        extra = {"no JSON object"}
    if extra:
        rule = f"it holds {', '.join(sorted(known))}, and not {', '.join(sorted(extra))}"
        fix = "Write one by mpipar plan --measure --machine FILE"
        raise ConfigError(explain("machine", str(path), rule, fix))
    return Machine(**found)


def write(path: Path, machine: Machine) -> None:
    """Write a machine as JSON."""
    path.write_text(json.dumps(asdict(machine), indent=1) + "\n")


def measure(config: ModelConfig, machine: Machine | None = None, tokens: int = TOKENS) -> Machine:
    """Return the machine with the speeds of this process, for the sizes of a model; about 1 s.

    Ranks that will train together should call it together, as many as there are cores, with the
    threads that they will train with.  Its network stays what it was.
    """
    from mpipar.plan import compute  # whose table says how many accesses an operation has

    tokens = min(tokens, TOKENS)
    dtype = compute_dtype(as_dtype(config.dtype))
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    layers = [_Layer(config, tokens, draw) for _ in range(_layers(config, tokens))]
    x, y = layers[0].x, layers[0].linear[0][1]
    products = _seconds(lambda: _each(layers, _Layer.multiply)) / len(layers)
    attention = _seconds(lambda: _each(layers, _Layer.attend)) / len(layers)
    seq = min(config.seq, tokens)
    pairs = (tokens // seq) * seq * (seq + 1) / 2 * config.dim
    weight, bias = draw(config.dim), draw(config.dim)
    elements = _seconds(lambda: _elementwise(x, y, weight, bias))
    bytes = tokens * compute.MEASURED(config.dim, config.hidden) * dtype.itemsize
    adds = np.ones(1 << 20, np.float32)
    sums = np.empty_like(adds)
    one = Machine() if machine is None else machine
    small = np.ones(1)
    return replace(
        one,
        flops=6.0 * tokens * config.dim * (config.hidden + config.dim) / products,
        attention_flops=compute.ATTENTION_PRODUCTS * 2.0 * pairs / attention,
        memory_bandwidth=bytes / elements,
        overhead=max(5e-6, 4 * _seconds(lambda: np.add(small, small), 0.02)),
        gamma=_seconds(lambda: np.add(adds, adds, out=sums)) / adds.nbytes,
    )


class _Layer:
    """Operands of a block.  Several are used in turn, so that they come from memory, as a model's
    do, and not from the cache."""

    def __init__(self, config: ModelConfig, tokens: int, draw: Callable[..., np.ndarray]) -> None:
        seq, size = min(config.seq, tokens), config.head_dim
        small = np.sqrt(1 / config.dim).astype(draw(1).dtype)  # so that results are of size 1
        self.x = draw(tokens, config.dim)
        weights = [draw(rows, config.dim) * small for rows in (config.hidden, config.dim)]
        self.linear = [(w, self.x @ w.T, self.x.copy(), w.copy()) for w in weights]
        heads = config.heads, config.kv_heads, config.kv_heads
        joint = draw(tokens // seq, seq, sum(heads), size)  # as one linear layer leaves them
        self.qkv = np.split(joint, np.cumsum(heads)[:-1], axis=2)

    def multiply(self) -> None:
        """Run two linear layers forward and backward."""
        for weight, y, dx, dw in self.linear:
            product(self.x, weight.T, y)
            product(y, weight, dx)
            product(y.T, self.x, dw)

    def attend(self) -> None:
        """Run attention forward and backward."""
        q, k, v = self.qkv
        mask = attention_kernel.Mask(True, q.shape[3] ** -0.5, 0, 0)
        out, lse = attention_kernel.forward(q, k, v, mask)
        delta = attention_kernel.row_delta(out, out, None)
        attention_kernel.backward(out, q, k, v, lse, delta, mask)


def _each(layers: list[_Layer], work: Callable[[_Layer], None]) -> None:
    for layer in layers:
        work(layer)


def _layers(config: ModelConfig, tokens: int) -> int:
    """Return how many layers are used in turn: 4, or fewer where they are large."""
    nbytes = 4 * (2 * config.dim + tokens) * (config.hidden + 5 * config.dim)
    return max(1, min(4, SPREAD // nbytes))


def _elementwise(x: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> None:
    """Run what `compute.MEASURED` counts."""
    _, stats = layer_norm_kernel.forward(x, weight, bias, 1e-5)
    layer_norm_kernel.backward(x, x, weight, stats)
    gelu_kernel.forward(y)
    gelu_kernel.backward(y, y)
    np.add(x, x)


def _seconds(work: Callable[[], object], least: float = SECONDS) -> float:
    """Return the middle time of some runs."""
    work()
    times, start = list[float](), time.perf_counter()
    while time.perf_counter() - start < least or len(times) < 3:
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return median(times)
