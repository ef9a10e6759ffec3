"""Rows become tokens: sources, formats, chat templates and label masks, micro-batches, and a look at all of it."""
