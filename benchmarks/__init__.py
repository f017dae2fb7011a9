"""Benchmarks: commands that print one table with the machine on it. README.md lists them."""
