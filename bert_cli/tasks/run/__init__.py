"""The code of every training run, from settings to checkpoints."""
