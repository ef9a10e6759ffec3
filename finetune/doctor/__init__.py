"""What is wrong with a machine, before a job is started on it, or with a run directory, before it is relied on."""
