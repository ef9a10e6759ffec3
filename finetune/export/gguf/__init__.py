"""GGUF files for llama.cpp and Ollama, and their proof."""
