"""Layer 2: BERT as an ordered list of blocks."""
