"""Benchmarks of the engine: each prints one table with the machine, and ratios within one run."""
