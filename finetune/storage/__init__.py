"""Files that survive a crash: the run directory, checkpoints and weights."""
