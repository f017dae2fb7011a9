"""A study in virtual time: how long it takes and what it can decide, before a GPU is at hand."""
