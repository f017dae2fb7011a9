"""The servers under measurement, with a module for each kind of engine."""
