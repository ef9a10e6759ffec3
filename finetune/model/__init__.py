"""From a name to a model that can be trained: tokenizer, base, quantization, attention, adapter, checkpointing."""
