"""What of a forward pass is kept, moved to the host or computed again."""
