"""The memory and time of a step, from running it on fake tensors."""
