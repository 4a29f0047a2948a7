"""`bert init`: from a text to the settings and commands of a run."""
