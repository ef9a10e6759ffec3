"""Answers of a run's models, and their scores."""
