"""Settings of commands, and the plan of a run."""
