"""Restartable steps: a function over many shards, with a manifest of what is complete."""
