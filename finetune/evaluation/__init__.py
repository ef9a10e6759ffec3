"""What commands do with the models of a run: `eval` and its metrics, `chat`, `generate`."""
