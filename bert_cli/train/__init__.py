"""Layer 5: the loop of a run, a step, checkpoints and metrics."""
