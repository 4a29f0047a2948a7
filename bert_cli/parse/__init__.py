"""Layer 1: words and files to settings. It names no command."""
