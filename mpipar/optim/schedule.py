"""The learning rate as a pure function of the step: linear warm-up, then half a cosine.

peak  |    /‾‾\\__
      |   /      \\__
floor |  /          \\____      (Loshchilov and Hutter, SGDR, ICLR 2017, without restarts)
      +--------------------> step
        warmup       total
"""

from math import cos, pi

from mpipar.errors import ConfigError, explain


def cosine(step: int, total: int, peak: float, warmup: int = 0, floor: float = 0.0) -> float:
    """Return the learning rate of a step.

    step: steps taken before this one, so 0 for the first.  The rate rises by equal amounts to
    `peak` at step == warmup, falls to `floor` at step == total and stays there.
    Raises ConfigError for negative numbers, or a warm-up longer than the whole.
    """
    if step < 0:
        raise ConfigError(explain("step", step, "steps must count from 0", "Pass step >= 0"))
    if not 0 <= warmup <= total:
        rule = f"the warm-up must be a part of all {total} steps"
        raise ConfigError(explain("warmup", warmup, rule, "Pass 0 <= warmup <= total"))
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step >= total:
        return floor
    progress = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + cos(pi * progress))
