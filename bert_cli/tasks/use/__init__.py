"""Prediction and export."""
