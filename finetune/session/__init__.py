"""One start of a run: its lock and signals, its inputs, what it resumes from, how it is built and how it fails."""
