"""Layer 2: the optimizer, the loss scale and the learning rate."""
