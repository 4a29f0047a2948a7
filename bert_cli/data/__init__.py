"""Floor 2: from a dump to the batches of a step."""
