"""Commands that inspect a machine, a run or its results."""
