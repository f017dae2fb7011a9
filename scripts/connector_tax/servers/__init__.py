"""The servers that are measured: one door, a module for each kind of engine."""
