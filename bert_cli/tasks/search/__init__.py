"""Search in an index of passages."""
