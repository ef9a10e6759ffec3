"""What people look at: terminal, plots and pages."""
