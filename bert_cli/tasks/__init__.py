"""Layer 6: wiring, and one file per kind of run."""
