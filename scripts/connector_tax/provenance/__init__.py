"""Trace numbers to their origin: environment, manifest."""
