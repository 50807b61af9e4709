"""From arrays to a kernel's arguments: layouts, batches, and which parts of the epilogue."""

from math import prod

from mpipar.arrays import Array, is_sixteen_bit, module_of
from mpipar.errors import ConfigError, explain
from mpipar.kernels.device import blocks
from mpipar.kernels.matmul import epilogue, mma, simt, wgmma
from mpipar.kernels.matmul.formula import Task


def matmul_cuda(task: Task, out: Array | None, implementation: str) -> Array:
    """Return what the task says, in `out` if given.

    "auto" is "mma" for 16-bit numbers, "wgmma" where the GPU has it and it pays.
    Raises ConfigError for "mma" and "wgmma" of other numbers, and for "wgmma" of rows that do not
    begin at 16 bytes.
    """
    xp, (m, n, k) = module_of(task.a), task.sizes
    dtype, shape = task.dtype, task.shape
    if dtype.name not in simt.PRODUCT:
        rule = f"on a GPU there are products of {', '.join(simt.PRODUCT)}"
        raise ConfigError(explain("dtype", dtype.name, rule, "Convert the arrays"))
    halves = is_sixteen_bit(dtype)
    if implementation in ("mma", "wgmma") and not halves:
        rule = "tensor cores multiply float16 and bfloat16 here"
        raise ConfigError(explain("dtype", dtype.name, rule, 'Pass implementation="simt"'))
    target = out
    if target is None or not target.flags.c_contiguous or target.dtype != dtype:
        target = xp.empty(shape, dtype)
        if task.accumulate:
            target[...] = out
    flags = epilogue.ACCUMULATE if task.accumulate else 0
    a, a_turned, a_step = _operand(task.a, task.transpose_a, task)
    b, b_turned, b_step = _operand(task.b, task.transpose_b, task)
    flags |= epilogue.TRANSPOSE_A if a_turned else 0
    flags |= epilogue.TRANSPOSE_B if b_turned else 0
    extra = []  # a, for what there is not: never read
    for bit, x in (
        (epilogue.BIAS, task.bias), (epilogue.UP, task.up), (epilogue.RESIDUAL, task.residual),
    ):  # fmt: skip
        flags |= 0 if x is None else bit
        extra.append(a if x is None else xp.ascontiguousarray(x.astype(dtype, copy=False)))
    flags |= {"gelu": epilogue.GELU, "silu": epilogue.SILU, None: 0}[task.activation]
    batch = prod(shape[:-2])
    if halves and implementation != "simt":
        bias, up, residual = extra
        steps = {"batch": batch, "a_step": a_step, "b_step": b_step}
        product = mma.product_mma
        if implementation == "wgmma" or (implementation == "auto" and _pays(batch, m, n)):
            if wgmma.fits(a, b, m, n, k, flags, a_step=a_step, b_step=b_step):
                product = wgmma.product_wgmma
            elif implementation == "wgmma":
                rule = "all rows of both operands begin at multiples of 16 bytes for wgmma"
                raise ConfigError(explain("shape", (m, n, k), rule, 'Pass implementation="mma"'))
        product(a, b, target, m, n, k, flags, **steps, bias=bias, up=up, residual=residual)
    else:
        tiles = blocks(m, simt.TILE) * blocks(n, simt.TILE) * batch
        code = simt.PRODUCT[dtype.name]
        code(tiles, simt.THREADS, a, b, target, *extra, m, n, k, a_step, b_step, flags)
    if out is None or out is target:
        return target
    out[...] = target
    return out


def _pays(batch: int, m: int, n: int) -> bool:
    """Say whether "auto" is "wgmma": on Hopper, if there are tiles enough."""
    if not wgmma.pays(batch, m, n):
        return False
    import cupy

    return bool(cupy.cuda.Device().compute_capability == wgmma.CAPABILITY)


def _operand(x: Array, turned: bool, task: Task) -> tuple[Array, bool, int]:
    """Return contiguous matrices, whether they are transposed, and the step between them."""
    xp, batch = module_of(x), task.shape[:-2]
    x = x.astype(task.dtype, copy=False)
    if x.shape[:-2] != batch and prod(x.shape[:-2]) != 1:
        x = xp.broadcast_to(x, (*batch, *x.shape[-2:]))
    if not x.flags.c_contiguous:
        other = xp.swapaxes(x, -1, -2)
        if other.flags.c_contiguous:
            x, turned = other, not turned
        else:
            x = xp.ascontiguousarray(x)
    step = 0 if prod(x.shape[:-2]) == 1 else x.shape[-1] * x.shape[-2]
    return x, turned, step
