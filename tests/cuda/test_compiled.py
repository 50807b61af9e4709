"""Every CUDA kernel, compiled for two architectures: nothing that should be in registers is not."""

import importlib.util

import pytest

from mpipar.bench.kernels_compiled import Compiled, measure
from mpipar.kernels.device_cache import modules

REGISTERS = 65536  # of a multiprocessor: a block's threads share them
SHARED, HOPPER = 48 << 10, 227 << 10  # static, a block; all that a block can have on Hopper

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
    ),
    pytest.mark.time_limit(400),  # the first test compiles all, a minute or two on two cores
]


@pytest.fixture(scope="module")
def rows() -> list[Compiled]:
    """A row for each version; `mpipar bench kernels --compile-only` prints them as a table."""
    found, seconds = measure()
    print(f"{len(found)} versions in {seconds:.0f} s")
    return found


def registers_of_a_block(row: Compiled) -> int:
    """A thread gets a multiple of 8."""
    return -(-row.registers // 8) * 8 * row.threads


def test_every_module_is_there(rows: list[Compiled]) -> None:
    for target in ("80", "90"):
        names = [row.kernel for row in rows if row.target == target]
        assert len(names) == len(set(names)) > 100
    products = ("matmul.simt", "matmul.mma", "matmul.wgmma")
    for module in ("permute", "attention.cuda", *products, "softmax_cuda"):
        assert module in modules()
        assert any(row.kernel.startswith(module.replace(".", "_")) for row in rows)


def test_nothing_is_spilled(rows: list[Compiled]) -> None:
    assert not [row for row in rows if row.stack or row.spills]
    assert all(0 < row.registers <= 255 for row in rows)
    assert not [row for row in rows if registers_of_a_block(row) > REGISTERS]
    assert all(row.shared <= (HOPPER if row.target == "90a" else SHARED) for row in rows)


def test_what_is_claimed(rows: list[Compiled]) -> None:
    """Tensor cores, and 16 bytes at a time."""
    products = [row for row in rows if row.kernel.startswith("matmul_mma")]
    assert products
    assert all(row.mma and row.copies16 for row in products)
    assert all(row.loads16 for row in rows if row.kernel.startswith("permute_rows16"))


def test_hoppers_products_do_not_wait_for_one_another(rows: list[Compiled]) -> None:
    """The assembler would say so, or that it had to order registers itself."""
    products = [row for row in rows if row.kernel.startswith("matmul_wgmma")]
    assert {row.target for row in products} == {"90a"}
    assert len(products) == 8  # layouts and number types
    assert all(row.mma == 4 and row.copies16 and not row.remarks for row in products)
