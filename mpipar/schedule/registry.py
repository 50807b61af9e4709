"""The table of generators: which algorithms exist for each collective, and `make` to get one.

A generator is a function `(p, rank, **options)` that yields the rounds of one rank.  It enters the
table by the decorator `register` where it is defined; the table is complete once
`mpipar.schedule` is imported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, TypeVar

from mpipar.errors import ConfigError, explain
from mpipar.partition import blocks
from mpipar.schedule.core import COLLECTIVES, CommSchedule, Round, Symmetry

Rounds = Callable[..., Iterator[Round]]
F = TypeVar("F", bound=Rounds)


@dataclass(frozen=True)
class Generator:
    """One algorithm for one collective.

    `rounds(p, rank, **options)` yields the rounds, `chunks(p, **options)` counts the chunk ids.
    `ordered` says that operands are added in rank order, so that a non-commutative operation works.
    `options` names what of root, offset and nodes it takes; `about` is one line with the source.
    `symmetry` declares which ranks behave alike, given the ranks of each node (see `classes`); of a
    generator that takes nodes, it is given those of the schedule first.  `shared` says that the
    ranks of a node read each other's memory.  Every generator works for every number of ranks.
    """

    collective: str
    algorithm: str
    rounds: Rounds
    chunks: Callable[..., int]
    ordered: bool
    options: tuple[str, ...]
    about: str
    symmetry: Callable[..., Symmetry | None] | None = None
    shared: bool = False


generators: dict[str, dict[str, Generator]] = {collective: {} for collective in COLLECTIVES}


def one(p: int, **_: object) -> int:
    """Count one chunk: the whole vector."""
    return 1


def per_rank(p: int, **_: object) -> int:
    """Count one chunk for each rank."""
    return p


def per_pair(p: int, **_: object) -> int:
    """Count one chunk for each pair of source and destination."""
    return p * p


def register(
    collective: str,
    algorithm: str,
    about: str,
    *,
    chunks: Callable[..., int],
    ordered: bool = False,
    options: tuple[str, ...] = (),
    symmetry: Callable[..., Symmetry | None] | None = None,
    shared: bool = False,
) -> Callable[[F], F]:
    """Enter the decorated generator into the table."""

    def enter(rounds: F) -> F:
        generators[collective][algorithm] = Generator(
            collective, algorithm, rounds, chunks, ordered, options, about, symmetry, shared
        )
        return rounds

    return enter


def algorithms(collective: str, shared: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms for `collective` that work on any arrays.

    With `shared` also those that need memory which the ranks of a node can read.
    Raises ConfigError if there is no such collective.
    """
    of = _of(collective)
    return tuple(name for name, generator in of.items() if shared or not generator.shared)


def default_nodes(p: int) -> tuple[int, ...]:
    """Return the node sizes that `make` assumes if it is told none: about sqrt(p) nodes.

    They are equal if a number of nodes from sqrt(p)/2 to sqrt(p) divides p.
    """
    most = isqrt(p)
    fits = [count for count in range(most, most // 2, -1) if p % count == 0]
    return blocks(p, fits[0] if fits else most)


def make(
    collective: str,
    algorithm: str,
    p: int,
    *,
    root: int = 0,
    offset: int = 1,
    nodes: Sequence[int] | None = None,
) -> CommSchedule:
    """Return the schedule of `algorithm` for `collective` on `p` ranks.

    `root` matters to broadcast, reduce, gather and scatter, `offset` to shift, and `nodes`, the
    number of ranks on each node (consecutive ranks share a node), to hierarchical and window.

    Raises ConfigError for an unknown name, p < 1, a root outside 0..p-1, or nodes that do not sum
    to p.
    """
    of = _of(collective)
    if algorithm not in of:
        rule = f"{collective} has the algorithms {', '.join(of)}"
        raise ConfigError(explain("algorithm", algorithm, rule, "Choose one of them"))
    if p < 1:
        raise ConfigError(explain("p", p, "a group has at least one rank", "Pass p >= 1"))
    generator = of[algorithm]
    options: dict[str, Any] = {}
    if "root" in generator.options:
        options["root"] = _checked_root(root, p)
    if "offset" in generator.options:
        options["offset"] = offset
    if "nodes" in generator.options:
        options["nodes"] = _checked_nodes(nodes, p)
    symmetry = generator.symmetry
    if symmetry is not None and "nodes" in options:
        symmetry = partial(symmetry, options["nodes"])
    return CommSchedule(
        collective,
        algorithm,
        ranks=p,
        chunks=generator.chunks(p, **options),
        make=partial(generator.rounds, p, **options),
        root=options.get("root", 0),
        offset=options.get("offset", 1),
        shared=options["nodes"] if generator.shared else (),
        symmetry=symmetry,
    )


def _of(collective: str) -> dict[str, Generator]:
    if collective not in generators:
        rule = f"the collectives are {', '.join(generators)}"
        raise ConfigError(explain("collective", collective, rule, "Choose one of them"))
    return generators[collective]


def _checked_root(root: int, p: int) -> int:
    if not 0 <= root < p:
        raise ConfigError(explain("root", root, f"ranks are 0..{p - 1}", "Pass one of them"))
    return root


def _checked_nodes(nodes: Sequence[int] | None, p: int) -> tuple[int, ...]:
    if nodes is None:
        return default_nodes(p)
    if not nodes or min(nodes) < 1 or sum(nodes) != p:
        rule = f"every node has at least one rank, and together they have p={p}"
        raise ConfigError(explain("nodes", tuple(nodes), rule, "Pass the ranks of each node"))
    return tuple(nodes)
