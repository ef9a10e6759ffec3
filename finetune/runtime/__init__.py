"""The process and its libraries: device, ranks, signals, randomness."""
