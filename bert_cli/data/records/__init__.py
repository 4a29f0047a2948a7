"""From sentences to training records, and the record formats."""
