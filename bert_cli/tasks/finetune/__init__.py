"""The fine-tuning commands."""
