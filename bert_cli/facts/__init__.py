"""Layer 1: what models and optimizers are: shapes, heads, architectures, and the sizes that follow."""
