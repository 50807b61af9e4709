"""The machine that `simulate` assumes, and the conventions for bytes and bandwidths."""

from dataclasses import dataclass

from mpipar.errors import ConfigError, explain
from mpipar.schedule.core import CommSchedule


@dataclass(frozen=True)
class Network:
    """Times of one machine, in seconds and bytes.

    The defaults are a common cluster: 2 us and 12.5 GB/s (100 Gbit/s) between nodes, 0.5 us and
    20 GB/s inside, additions at 10 GB/s.  Raises ConfigError for a negative time.
    """

    alpha: float = 2e-6
    """Seconds a message between nodes."""
    beta: float = 0.08e-9
    """Seconds a byte between nodes."""
    gamma: float = 0.1e-9
    """Seconds a byte that is added."""
    alpha_intra: float = 0.5e-6
    """Seconds a message inside a node."""
    beta_intra: float = 0.05e-9
    """Seconds a byte inside a node."""
    nodes: int | tuple[int, ...] | None = None
    """Ranks of each node, consecutive ranks sharing one.  A number: as many on every node, the
    last may have fewer.  None: one rank on each node."""
    shared: bool = False
    """The ranks of a node share one link to the other nodes."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "alpha_intra", "beta_intra"):
            if not getattr(self, name) >= 0:
                rule = "a time is not negative"
                raise ConfigError(explain(name, getattr(self, name), rule, "Pass seconds >= 0"))

    def layout(self, p: int) -> tuple[int, ...]:
        """Return the ranks of each node for a group of `p`; ConfigError if they do not add up."""
        if self.nodes is None:
            return (1,) * p
        if isinstance(self.nodes, int):
            whole, rest = divmod(p, self.nodes) if self.nodes > 0 else (0, 0)
            sizes = (self.nodes,) * whole + ((rest,) if rest else ())
        else:
            sizes = self.nodes
        if sum(sizes) != p or min(sizes) < 1:
            rule = f"every node has at least one rank, and together they have p={p}"
            raise ConfigError(explain("nodes", self.nodes, rule, "Pass the ranks of each node"))
        return sizes


CLUSTER = Network()


def chunk_bytes(schedule: CommSchedule, bytes: float) -> float:
    """Return the bytes of each chunk if one rank's whole vector (nccl-tests' S) has `bytes`.

    The whole vector is the result of all_gather and gather, the input of reduce_scatter and
    scatter, the input of one rank of all_to_all, and the one block of a shift.  A barrier has none.
    """
    match schedule.collective:
        case "barrier":
            return 0.0
        case "shift":
            count = schedule.parts
        case "all_to_all":
            count = schedule.ranks * schedule.parts
        case _:
            count = schedule.chunks
    return bytes / count


def bus_bandwidth(collective: str, bytes: float, ranks: int, seconds: float) -> float:
    """Return bytes a second on the busiest link, by the convention of nccl-tests.

    It compares collectives and rank counts: a perfect one shows the link's own bandwidth.
    """
    if seconds <= 0:
        return 0.0
    factor = {"all_reduce": 2.0 * (ranks - 1) / ranks, "barrier": 0.0}
    for name in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        factor[name] = (ranks - 1) / ranks
    return factor.get(collective, 1.0) * bytes / seconds
