"""The merge of an adapter into its base, weight by weight from file to file."""
