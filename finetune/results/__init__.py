"""The results of runs in numbers, read from their directories for the terminal, the pages and programs."""
