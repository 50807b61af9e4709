"""`mpipar train`: configuration, data, the training loop and what it shows."""
