"""A model from disk that answers."""
