"""The engine on TensorFlow: one update on many devices."""
