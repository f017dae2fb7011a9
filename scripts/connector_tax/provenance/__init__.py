"""Trace published numbers to their origin: environment, manifest, archive, audit."""
