"""The training loop and its parts: steps, optimizers, checkpoints, evaluation, out-of-memory retry."""
