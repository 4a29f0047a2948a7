"""Layer 1: what classes of settings and descriptions of models are made of: base class and markers of fields."""
