"""Files that start a job on several nodes with the standard tool of a cluster."""
