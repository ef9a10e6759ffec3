"""Output for people: the terminal, views, plots and pages."""
