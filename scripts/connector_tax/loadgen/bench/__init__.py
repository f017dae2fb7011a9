"""Benchmarks of the load generator; each is a command that prints one table with the machine."""
