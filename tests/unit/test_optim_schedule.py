"""The learning rate: warm-up, cosine, floor."""

import math
from itertools import pairwise

import pytest

from mpipar.errors import ConfigError
from mpipar.optim import cosine


def test_it_rises_evenly_to_the_peak_then_falls_to_the_floor():
    rates = [cosine(step, 20, peak=1.0, warmup=4, floor=0.1) for step in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.55)  # half of the way: the middle of peak and floor
    assert rates[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert all(a > b for a, b in pairwise(rates[4:21]))
    assert rates[20:] == [0.1] * 5


def test_without_warmup_it_starts_at_the_peak():
    assert cosine(0, 10, peak=3e-4) == 3e-4


def test_all_of_it_may_be_warmup():
    assert cosine(1, 2, peak=3.0, warmup=2) == 2.0
    assert cosine(2, 2, peak=3.0, warmup=2) == 0.0


@pytest.mark.parametrize(
    ("step", "total", "warmup", "name"),
    [(-1, 5, 0, "step"), (0, 5, 6, "warmup"), (0, 5, -1, "warmup")],
)
def test_what_makes_no_sense_is_refused(step, total, warmup, name):
    with pytest.raises(ConfigError, match=name):
        cosine(step, total, 1.0, warmup)
