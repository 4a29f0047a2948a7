"""Layer 2: the arithmetic of a run: its steps, memory, layout, operations and checks."""
