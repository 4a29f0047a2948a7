"""Floor 3: one step, spread over devices."""
