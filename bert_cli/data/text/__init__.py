"""From a dump or a person's files to sentences."""
