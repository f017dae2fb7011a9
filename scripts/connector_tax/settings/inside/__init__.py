"""Programs that run in vLLM's interpreter and import nothing of this package."""
