"""`mpipar doctor`: what is wrong with this machine, this job, or a job that got stuck."""
