"""Where a model comes from: its files, names, tokenizer and chat template."""
