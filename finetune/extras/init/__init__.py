"""A first config, from a model and data or from the config of another tool."""
