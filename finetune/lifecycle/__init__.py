"""One start of a run, around its training: the lock and signals, preparation, plan, resuming, publishing."""
