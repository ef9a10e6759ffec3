"""Diagnoses a machine before a job is started on it, or a run directory before it is used."""
