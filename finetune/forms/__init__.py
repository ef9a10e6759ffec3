"""The forms of quantized weights: how values become bytes and are read again, in memory and in files."""
