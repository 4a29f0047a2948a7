"""How layers compute, and what scales them."""
