"""Layer 4: one step, spread over devices."""
