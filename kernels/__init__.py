"""Kernels: the arithmetic and layout work, one file an operation.

The folder stands at the top level and is imported as `mpipar.kernels` (a symbolic link).
"""
