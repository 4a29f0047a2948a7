"""Floor 5: wiring, and one file per kind of run."""
