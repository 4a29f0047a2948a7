"""What every training run does, from settings to checkpoints."""
