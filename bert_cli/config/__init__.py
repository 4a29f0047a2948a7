"""Floor 1: what was asked, in whole numbers."""
