"""The parts of a model: linear layers and experts, plain or quantized, and their weights in files."""
