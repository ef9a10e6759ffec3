"""What a run does not need: each brings its command, its tests and its page, and can be read or removed alone."""
