"""Layer 1: the settings of commands: their fields, how they are read and how they are explained."""
