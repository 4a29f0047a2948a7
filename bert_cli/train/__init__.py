"""Floor 4: what every run walks."""
