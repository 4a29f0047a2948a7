"""The engine on JAX: one compiled function for a step, layouts by annotation."""
