"""Answers of a model in memory: in batches or streamed, with a KV cache of choice, and reproducible."""
