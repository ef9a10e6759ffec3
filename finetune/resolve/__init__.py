"""The one place that derives a config from another: every `auto` becomes a value, with its reason."""
