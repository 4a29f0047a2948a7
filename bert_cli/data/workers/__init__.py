"""The work on shards: restarts, processes, clusters and other programs."""
