"""From records to the batch of a step."""
