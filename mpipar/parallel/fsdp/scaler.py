"""The loss scale that keeps small float16 gradients from vanishing.

    loss * scale ─ backward ─ gradients * scale ─ finite on all ranks?  step with gradients / scale
                                                  not: no step, half the scale

float16 loses what is below 6e-8 and overflows at 65504; bfloat16 has the range of float32 and needs
no scale.  Every `interval` good steps the scale doubles.  Micikevicius et al., Mixed Precision
Training (ICLR 2018), section 3.2.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpipar.arrays import is_sixteen_bit, module_of
from mpipar.errors import ConfigError, explain
from mpipar.parallel.communicator import Communicator


class LossScaler:
    """A dynamic loss scale that all ranks of `comm` agree on.

        scaler = mp.LossScaler(mesh.world)
        for batch in batches:
            optimizer.zero_grad()
            (loss_of(batch) * scaler.scale).backward()
            scaler.step(optimizer)

    comm: all ranks that hold a part of the model or of the batch.
    scale: a power of two, so that scaling rounds nothing.  skipped: the steps not taken so far.
    """

    def __init__(
        self,
        comm: Communicator,
        scale: float = 2.0**16,
        interval: int = 2000,
        least: float = 1.0,
        most: float = 2.0**24,
    ) -> None:
        """Settings, the same on every rank; raises ConfigError for those that cannot work."""
        if not 0 < least <= scale <= most:
            rule = f"it must be positive, and between least={least} and most={most}"
            raise ConfigError(explain("scale", scale, rule, "Pass 65536, for example"))
        if interval < 1:
            rule = "it must be a number of steps"
            raise ConfigError(explain("interval", interval, rule, "Pass 1 or more"))
        self.comm, self.scale, self.interval = comm, float(scale), interval
        self.least, self.most = least, most
        self.good = self.skipped = 0  # steps since the scale changed; steps not taken

    def finite(self, params: Iterable[Any]) -> bool:
        """Collective: say whether all gradients on all ranks are finite."""
        here = all(_is_finite(param.grad) for param in params if param.grad is not None)
        bad = np.array([not here], np.uint8)
        return not self.comm.all_reduce(bad, "max")[0]

    def update(self, finite: bool) -> bool:
        """Take note of a step, the same on every rank: whether its gradients were finite.

        For loops that know it already, by the norm that all ranks have.  Returns `finite`.
        """
        if not finite:
            self.scale, self.good = max(self.scale / 2, self.least), 0
            self.skipped += 1
            return False
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = min(self.scale * 2, self.most), 0
        return True

    def step(self, optimizer: Any, grad_scale: float = 1.0) -> bool:
        """Collective: step with the gradients divided by the scale if all are finite.

        grad_scale: a factor more, that of clipping.  Returns whether there was a step.
        """
        scale = self.scale
        if not self.update(self.finite(optimizer.params())):
            return False
        optimizer.step(grad_scale / scale)
        return True

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what a resumed run needs."""
        return {"scale": np.array([self.scale]), "good": np.array([self.good])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scale, and the number of good steps, from a state_dict()."""
        self.scale, self.good = float(state["scale"][0]), int(state["good"][0])


def _is_finite(grad: Any) -> bool:
    wide = grad.astype(np.float32) if is_sixteen_bit(grad.dtype) else grad
    return bool(module_of(wide).isfinite(wide).all())
