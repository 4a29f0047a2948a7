"""The commands of data, each a file with `run(settings)`."""
