"""Files of people and of data steps: input formats, manifests, and the work on shards."""
