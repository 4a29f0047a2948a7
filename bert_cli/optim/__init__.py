"""Floor 2: how a gradient becomes a move of the weights."""
