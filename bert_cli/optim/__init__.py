"""Layer 3: the optimizer, the loss scale and the learning rate."""
