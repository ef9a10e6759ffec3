"""A trained model in the forms that other programs read, each proven to compute what was trained."""
