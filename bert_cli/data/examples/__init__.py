"""Records to batches: which example stands where in an endless shuffled stream."""
