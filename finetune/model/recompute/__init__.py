"""Activations of a forward pass: kept, moved to the host, or computed again in the backward pass."""
