"""Layer 3: from a dump to the batches of a step."""
