"""Tests of the batch scripts on a small Slurm of their own."""
