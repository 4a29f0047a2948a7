"""The names that other programs have for weights and settings of a model."""
