"""The formula of attention in float64, and what its arguments are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpipar.errors import BufferMismatchError, ConfigError, explain

Pump = Callable[[], None]
Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]  # of q, k and v


class Mask(NamedTuple):
    """Which keys a query sees: those up to its own position, if causal; and the score's scale."""

    causal: bool = True
    scale: float = 1.0
    q_offset: int = 0
    k_offset: int = 0


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """Return o (B, S, H, D) and L (B, H, S) in float64, through the full matrix of scores."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * mask.scale
    if mask.causal:
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        s = np.where(mask.k_offset + j <= mask.q_offset + i, s, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), -1e300)
    p = np.exp(s - top)
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    p /= np.where(total == 0, 1, total)[..., None]
    return np.einsum("bhij,bjhd->bihd", p, v), np.where(total == 0, -np.inf, lse)


def check(q: Any, k: Any, v: Any) -> None:
    """Raise BufferMismatchError or ConfigError if the shapes do not belong together."""
    if (
        q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]
        or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]
    ):  # fmt: skip
        raise BufferMismatchError(
            explain("attention of shapes", (q.shape, k.shape, v.shape),
                    "q is [batch, queries, heads, dim], k and v [batch, keys, kv heads, dim]",
                    "Permute or reshape them")
        )  # fmt: skip
    if q.shape[2] % k.shape[2]:
        rule = f"the {q.shape[2]} query heads are a multiple of the kv heads"
        raise ConfigError(explain("kv heads", k.shape[2], rule, "Change the number of heads"))


def nothing() -> None:
    """Do nothing between tiles."""
