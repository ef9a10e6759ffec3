"""What a model is made of: linear layers, experts, and their quantized forms."""
