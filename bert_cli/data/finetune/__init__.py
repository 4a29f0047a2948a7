"""Readers, features and metrics of the fine-tuning tasks."""
