"""Fused kernels of the training step."""
