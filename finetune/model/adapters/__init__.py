"""LoRA adapters: attached, started, saved, and read as PEFT alone reads them."""
