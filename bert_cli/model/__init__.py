"""Layer 3: encoders as ordered lists of blocks."""
