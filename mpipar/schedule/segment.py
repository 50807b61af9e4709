"""Cut every chunk into k parts, so that adding one part overlaps with receiving the next.

A lowering pass: what comes out is a schedule like any other, so what is verified is what is posted.
Chunk c becomes the chunks c*k .. c*k + k-1, and each round becomes k rounds, one for each part:

    before   | 3>1 2+3           | 2>1 1+3           |
    k = 2    | 6>1 4+3 | 7>1 5+3 | 4>1 2+3 | 5>1 3+3 |

An executor that posts the receives of a round before it adds those of the round before then always
has a part in flight.  Cost: alpha k times as often, and additions hidden behind receiving.
"""

from collections.abc import Iterator

from mpipar.errors import ConfigError, explain
from mpipar.schedule.core import CommSchedule, Round


def segment(schedule: CommSchedule, k: int) -> CommSchedule:
    """Return the schedule with every chunk cut into `k` parts; segmenting again cuts these again.

    Raises ConfigError if k < 1.
    """
    if k < 1:
        raise ConfigError(explain("k", k, "a chunk has at least one part", "Pass k >= 1"))
    if k == 1:
        return schedule

    def rounds(rank: int) -> Iterator[Round]:
        for ops in schedule.rounds(rank):
            for part in range(k):
                yield tuple(op._replace(chunk=op.chunk * k + part) for op in ops)

    return schedule.with_rounds(
        rounds,
        chunks=schedule.chunks * k,
        parts=schedule.parts * k,
        symmetry=schedule.symmetry,
    )
