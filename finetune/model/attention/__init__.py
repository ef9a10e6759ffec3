"""Attention backends, packed rows, and caches."""
