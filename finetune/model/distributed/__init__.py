"""A model, or its rows, divided among ranks."""
