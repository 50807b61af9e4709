"""Cases of the CUDA kernels, one file an operation, and what can be proven without a GPU.

Each `cases_*.py` has `run(xp, sizes)`, which compares kernels with their float64 references: with
the stand-in for CuPy and sizes "tiny" in Numba's simulator (tests/unit/test_cuda_simulated.py,
where a block of a few hundred threads takes half a second), with CuPy and "large" on a GPU
(tests/gpu/test_kernels.py).
"""
