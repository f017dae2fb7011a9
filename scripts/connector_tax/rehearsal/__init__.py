"""Rehearse a study in virtual time: estimate its duration and what it can decide, without a GPU."""
