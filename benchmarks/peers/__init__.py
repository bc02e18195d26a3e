"""Other structures for the same task, written for these benchmarks from their published ideas."""
