"""Attention on a GPU, any number type: 32 queries against 32 keys at a time, in shared memory.

A block of 16 x 16 threads has a tile of one head.  Thread (y, x) computes the scores of rows y and
y + 16 with columns x and x + 16, and of each row's result the elements x, x + 16, x + 32, ...

    forward    a tile of queries      for each tile of keys: scores, running maximum and total, o
    dq         a tile of queries      for each tile of keys: p and ds again, dq += ds k
    dk, dv     a tile of keys         for each query head of its group and each tile of queries

No two blocks write to the same place, and every sum has one order, so results are the same bits in
every run.  Heads are computed as if 64 or 128 wide; sums are float32, or float64 of float64.
"""

import math
from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.errors import ConfigError, explain
from mpipar.kernels.attention.formula import Gradients, Mask
from mpipar.kernels.device import (
    Kernel,
    blocks,
    constant,
    cuda,
    device,
    kernel,
    narrow,
    wide_dtype,
    widen,
)

TILE, SIDE, THREADS = 32, 16, 256
SCORES = TILE + 1  # the pitch of a tile of scores: no two rows begin in one bank
WIDTHS = (64, 128)
SINGLE = ("float32", "float16", "bfloat16")
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
SIZES = "int64, int64, int64, int64, int64, int32, W, int64"


@device
def load(mem, to, width, x, at, step, count, dim):  # type: ignore[no-untyped-def]
    """Copy a tile into shared memory: `count` rows of x from `at` on, `step` apart; then zeros."""
    for e in range(cuda.threadIdx.x, TILE * width, THREADS):
        r, d = e // width, e % width
        value = constant(0, x)
        if r < count and d < dim:
            value = widen(x[at + r * step + d])
        mem[to + r * (width + 1) + d] = value


@device
def load_row(mem, to, lse, delta, row, like):  # type: ignore[no-untyped-def]
    """Put L of a row, what a float32 of it leaves out, and D in their places, TILE apart."""
    whole = constant(lse[row], like)
    mem[to] = whole
    if whole > -math.inf:  # or no key is seen
        mem[to + TILE] = constant(lse[row] - np.float64(whole), like)
    mem[to + 2 * TILE] = constant(delta[row], like)


@device
def dot(mem, one, other, width, like):  # type: ignore[no-untyped-def]
    """Return the product of two rows in shared memory."""
    total = constant(0, like)
    for d in range(width):
        total += mem[one + d] * mem[other + d]
    return total


@device
def weight(mem, row, score):  # type: ignore[no-untyped-def]
    """Return p of a score, from L of its row."""
    return math.exp((score - mem[row]) - mem[row + TILE])


def _forward(width: int, wide: Any, dtypes: tuple[str, ...]) -> Kernel:
    """Make the kernel of o and L for heads of up to `width`."""
    pitch, columns = width + 1, width // SIDE
    at_kv, at_s, at_top = TILE * pitch, 2 * TILE * pitch, 2 * TILE * pitch + TILE * SCORES

    def forward(q, k, v, o, lse, queries, keys, heads, groups, dim, causal, scale, ahead):  # type: ignore[no-untyped-def]
        mem = cuda.shared.array(0, wide)  # q | k, then v | scores | top | fade | total
        fade, total = at_top + TILE, at_top + 2 * TILE
        t = cuda.threadIdx.x
        y, x = t // SIDE, t % SIDE
        b, h = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        g = h // (heads // groups)
        first = cuda.blockIdx.y * TILE
        at = ((b * queries + first) * heads + h) * dim
        load(mem, 0, width, q, at, heads * dim, queries - first, dim)
        if t < TILE:
            mem[at_top + t], mem[total + t] = constant(-math.inf, q), constant(0, q)
        low, high = cuda.local.array(columns, wide), cuda.local.array(columns, wide)
        for c in range(columns):
            low[c] = high[c] = constant(0, q)
        seen = keys
        if causal:
            seen = min(keys, max(ahead + min(first + TILE, queries), 0))
        for start in range(0, seen, TILE):
            cuda.syncthreads()
            at = ((b * keys + start) * groups + g) * dim
            load(mem, at_kv, width, k, at, groups * dim, keys - start, dim)
            cuda.syncthreads()
            s00 = s01 = s10 = s11 = constant(0, q)
            for d in range(width):
                q0, q1 = mem[y * pitch + d], mem[(y + SIDE) * pitch + d]
                k0, k1 = mem[at_kv + x * pitch + d], mem[at_kv + (x + SIDE) * pitch + d]
                s00 += q0 * k0
                s01 += q0 * k1
                s10 += q1 * k0
                s11 += q1 * k1
            for n in range(4):
                i, j = y + SIDE * (n // 2), x + SIDE * (n % 2)
                s = s00 if n == 0 else s01 if n == 1 else s10 if n == 2 else s11
                hidden = start + j >= keys or (causal and start + j > ahead + first + i)
                mem[at_s + i * SCORES + j] = constant(-math.inf, q) if hidden else s * scale
            cuda.syncthreads()
            load(mem, at_kv, width, v, at, groups * dim, keys - start, dim)
            if t < TILE:
                before = top = mem[at_top + t]
                for j in range(TILE):
                    top = max(top, mem[at_s + t * SCORES + j])
                mem[at_top + t] = top
                mem[fade + t] = math.exp(before - top) if top > -math.inf else constant(1, q)
            cuda.syncthreads()
            for n in range(4):
                i, j = y + SIDE * (n // 2), x + SIDE * (n % 2)
                place = at_s + i * SCORES + j
                s = mem[place]
                hidden = s == -math.inf
                mem[place] = constant(0, q) if hidden else math.exp(s - mem[at_top + i])
            cuda.syncthreads()
            if t < TILE:
                part = constant(0, q)
                for j in range(TILE):
                    part += mem[at_s + t * SCORES + j]
                mem[total + t] = mem[total + t] * mem[fade + t] + part
            f0, f1 = mem[fade + y], mem[fade + y + SIDE]
            for c in range(columns):
                low[c] *= f0
                high[c] *= f1
            for j in range(TILE):
                p0, p1 = mem[at_s + y * SCORES + j], mem[at_s + (y + SIDE) * SCORES + j]
                for c in range(columns):
                    value = mem[at_kv + j * pitch + x + SIDE * c]
                    low[c] += p0 * value
                    high[c] += p1 * value
        cuda.syncthreads()
        for n in range(2):
            i = y + SIDE * n
            if first + i < queries:
                sum_ = mem[total + i]
                share = constant(1, q) / sum_ if sum_ > constant(0, q) else constant(0, q)
                row = ((b * queries + first + i) * heads + h) * dim
                for c in range(columns):
                    d = x + SIDE * c
                    if d < dim:
                        o[row + d] = narrow((low[c] if n == 0 else high[c]) * share, o)
                if x == 0:
                    found = np.float64(-math.inf)
                    if sum_ > constant(0, q):
                        found = np.float64(mem[at_top + i]) + math.log(np.float64(sum_))
                    lse[(b * heads + h) * queries + first + i] = found

    return _named(forward, width, f"T[], T[], T[], T[], float64[], {SIZES}", dtypes)


def _queries(width: int, wide: Any, dtypes: tuple[str, ...]) -> Kernel:
    """Make the kernel of dq."""
    pitch, columns = width + 1, width // SIDE
    at_do, at_k, at_v = TILE * pitch, 2 * TILE * pitch, 3 * TILE * pitch
    at_s, at_row = 4 * TILE * pitch, 4 * TILE * pitch + TILE * SCORES

    def queries_back(  # type: ignore[no-untyped-def]
        do, q, k, v, lse, delta, dq, queries, keys, heads, groups, dim, causal, scale, ahead
    ):  # fmt: skip
        mem = cuda.shared.array(0, wide)  # q | do | k | v | ds | L, its rest, and D of each row
        t = cuda.threadIdx.x
        y, x = t // SIDE, t % SIDE
        b, h = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        g = h // (heads // groups)
        first = cuda.blockIdx.y * TILE
        at = ((b * queries + first) * heads + h) * dim
        load(mem, 0, width, q, at, heads * dim, queries - first, dim)
        load(mem, at_do, width, do, at, heads * dim, queries - first, dim)
        if t < TILE and first + t < queries:
            load_row(mem, at_row + t, lse, delta, (b * heads + h) * queries + first + t, q)
        low, high = cuda.local.array(columns, wide), cuda.local.array(columns, wide)
        for c in range(columns):
            low[c] = high[c] = constant(0, q)
        seen = keys
        if causal:
            seen = min(keys, max(ahead + min(first + TILE, queries), 0))
        for start in range(0, seen, TILE):
            cuda.syncthreads()
            at = ((b * keys + start) * groups + g) * dim
            load(mem, at_k, width, k, at, groups * dim, keys - start, dim)
            load(mem, at_v, width, v, at, groups * dim, keys - start, dim)
            cuda.syncthreads()
            for n in range(4):
                i, j = y + SIDE * (n // 2), x + SIDE * (n % 2)
                hidden = start + j >= keys or first + i >= queries
                hidden = hidden or (causal and start + j > ahead + first + i)
                ds = constant(0, q)
                if not hidden:
                    s = dot(mem, i * pitch, at_k + j * pitch, width, q)
                    dp = dot(mem, at_do + i * pitch, at_v + j * pitch, width, q)
                    ds = weight(mem, at_row + i, s * scale) * (dp - mem[at_row + 2 * TILE + i])
                mem[at_s + i * SCORES + j] = ds
            cuda.syncthreads()
            for j in range(TILE):
                d0, d1 = mem[at_s + y * SCORES + j], mem[at_s + (y + SIDE) * SCORES + j]
                for c in range(columns):
                    value = mem[at_k + j * pitch + x + SIDE * c]
                    low[c] += d0 * value
                    high[c] += d1 * value
        for n in range(2):
            i = y + SIDE * n
            if first + i < queries:
                row = ((b * queries + first + i) * heads + h) * dim
                for c in range(columns):
                    d = x + SIDE * c
                    if d < dim:
                        dq[row + d] = narrow((low[c] if n == 0 else high[c]) * scale, dq)

    takes = f"T[], T[], T[], T[], float64[], float64[], T[], {SIZES}"
    return _named(queries_back, width, takes, dtypes)


def _keys(width: int, wide: Any, dtypes: tuple[str, ...]) -> Kernel:
    """Make the kernel of dk and dv."""
    pitch, columns = width + 1, width // SIDE
    at_v, at_q, at_do = TILE * pitch, 2 * TILE * pitch, 3 * TILE * pitch
    at_p, at_ds = 4 * TILE * pitch, 4 * TILE * pitch + TILE * SCORES
    at_row = at_ds + TILE * SCORES

    def keys_back(  # type: ignore[no-untyped-def]
        do, q, k, v, lse, delta, dk, dv, queries, keys, heads, groups, dim, causal, scale, ahead
    ):  # fmt: skip
        mem = cuda.shared.array(0, wide)  # k | v | q | do | p | ds | L, its rest, and D of each row
        t = cuda.threadIdx.x
        y, x = t // SIDE, t % SIDE
        b, g = cuda.blockIdx.x // groups, cuda.blockIdx.x % groups
        each = heads // groups
        start = cuda.blockIdx.y * TILE
        at = ((b * keys + start) * groups + g) * dim
        load(mem, 0, width, k, at, groups * dim, keys - start, dim)
        load(mem, at_v, width, v, at, groups * dim, keys - start, dim)
        k_low, k_high = cuda.local.array(columns, wide), cuda.local.array(columns, wide)
        v_low, v_high = cuda.local.array(columns, wide), cuda.local.array(columns, wide)
        for c in range(columns):
            k_low[c] = k_high[c] = v_low[c] = v_high[c] = constant(0, q)
        from_ = np.int64(0)
        if causal:
            from_ = max(start - ahead, 0) // TILE * TILE  # the tile of the first query that sees it
        for head in range(g * each, (g + 1) * each):
            for first in range(from_, queries, TILE):
                cuda.syncthreads()
                at = ((b * queries + first) * heads + head) * dim
                load(mem, at_q, width, q, at, heads * dim, queries - first, dim)
                load(mem, at_do, width, do, at, heads * dim, queries - first, dim)
                if t < TILE and first + t < queries:
                    load_row(
                        mem, at_row + t, lse, delta, (b * heads + head) * queries + first + t, q
                    )
                cuda.syncthreads()
                for n in range(4):
                    i, j = y + SIDE * (n // 2), x + SIDE * (n % 2)
                    hidden = start + j >= keys or first + i >= queries
                    hidden = hidden or (causal and start + j > ahead + first + i)
                    p = ds = constant(0, q)
                    if not hidden:
                        s = dot(mem, at_q + i * pitch, j * pitch, width, q)
                        dp = dot(mem, at_do + i * pitch, at_v + j * pitch, width, q)
                        p = weight(mem, at_row + i, s * scale)
                        ds = p * (dp - mem[at_row + 2 * TILE + i])
                    mem[at_p + i * SCORES + j], mem[at_ds + i * SCORES + j] = p, ds
                cuda.syncthreads()
                for i in range(TILE):
                    p0, p1 = mem[at_p + i * SCORES + y], mem[at_p + i * SCORES + y + SIDE]
                    d0, d1 = mem[at_ds + i * SCORES + y], mem[at_ds + i * SCORES + y + SIDE]
                    for c in range(columns):
                        one = mem[at_q + i * pitch + x + SIDE * c]
                        other = mem[at_do + i * pitch + x + SIDE * c]
                        k_low[c] += d0 * one
                        k_high[c] += d1 * one
                        v_low[c] += p0 * other
                        v_high[c] += p1 * other
        for n in range(2):
            j = y + SIDE * n
            if start + j < keys:
                row = ((b * keys + start + j) * groups + g) * dim
                for c in range(columns):
                    d = x + SIDE * c
                    if d < dim:
                        dk[row + d] = narrow((k_low[c] if n == 0 else k_high[c]) * scale, dk)
                        dv[row + d] = narrow(v_low[c] if n == 0 else v_high[c], dv)

    takes = f"T[], T[], T[], T[], float64[], float64[], T[], T[], {SIZES}"
    return _named(keys_back, width, takes, dtypes)


def _named(python: Any, width: int, takes: str, dtypes: tuple[str, ...]) -> Kernel:
    """Make a kernel of a function, named after the width of its heads."""
    python.__name__ += str(width)
    return kernel(takes, dtypes=dtypes, threads=THREADS)(python)


def _both(make: Any, width: int) -> dict[str, Kernel]:
    """Return a kernel by number type: sums are float64 of float64, and float32 of the others."""
    single, double = make(width, F32, SINGLE), make(width, F64, ("float64",))
    return dict.fromkeys(SINGLE, single) | {"float64": double}


FORWARD = {width: _both(_forward, width) for width in WIDTHS}
QUERIES = {width: _both(_queries, width) for width in WIDTHS}
KEYS = {width: _both(_keys, width) for width in WIDTHS}
KERNELS = [
    one
    for table in (FORWARD, QUERIES, KEYS)
    for kinds in table.values()
    for one in dict.fromkeys(kinds.values())
]  # all, for who compiles them


def forward_cuda(q: Array, k: Array, v: Array, mask: Mask) -> tuple[Array, Array]:
    """Return o (B, S, H, D) and L (B, H, S) in float64."""
    xp = module_of(q)
    q, k, v = (xp.ascontiguousarray(a) for a in (q, k, v))
    batch, queries, heads, _ = q.shape
    o, lse = xp.empty(q.shape, q.dtype), xp.empty((batch, heads, queries), np.float64)
    width = _width(q)
    words = 2 * TILE * (width + 1) + TILE * SCORES + 3 * TILE
    _launch(FORWARD[width], (queries, batch * heads), words, q, k, mask, q, k, v, o, lse)
    return o, lse


def backward_cuda(
    do: Array, q: Array, k: Array, v: Array, lse: Array, delta: Array, mask: Mask, out: Gradients
) -> Gradients:
    """Return the gradients of q, k and v, in `out`."""
    xp = module_of(q)
    do, q, k, v, lse, delta = (xp.ascontiguousarray(a) for a in (do, q, k, v, lse, delta))
    batch, _, heads, _ = q.shape
    dq, dk, dv = (a if a.flags.c_contiguous else xp.empty(a.shape, a.dtype) for a in out)
    width = _width(q)
    words = 4 * TILE * (width + 1) + 2 * TILE * SCORES + 3 * TILE
    given = (do, q, k, v, lse, delta)
    _launch(QUERIES[width], (q.shape[1], batch * heads), words, q, k, mask, *given, dq)
    _launch(KEYS[width], (k.shape[1], batch * k.shape[2]), words, q, k, mask, *given, dk, dv)
    for target, made in zip(out, (dq, dk, dv), strict=True):
        if target is not made:
            target[...] = made
    return out


def _launch(
    kernels: dict[str, Kernel], rows: tuple[int, int], words: int, q: Array, k: Array, mask: Mask,
    *arrays: Array,
) -> None:  # fmt: skip
    """Start a kernel over tiles of rows[0] rows, for rows[1] heads; words: of shared memory."""
    sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    grid = (rows[1], blocks(rows[0], TILE))
    settings = (int(mask.causal), mask.scale, mask.q_offset - mask.k_offset)
    shared = words * wide_dtype(q).itemsize
    kernels[q.dtype.name](grid, THREADS, *arrays, *sizes, *settings, shared=shared)


def _width(q: Array) -> int:
    """Return the width of the kernel for these heads; raises ConfigError if there is none."""
    dim = q.shape[3]
    found = next((width for width in WIDTHS if dim <= width), 0)
    if not found:
        rule = f"heads are at most {WIDTHS[-1]} wide on a GPU"
        raise ConfigError(explain("width of a head", dim, rule, "Choose more heads"))
    return found
