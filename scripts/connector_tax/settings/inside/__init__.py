"""Programs that run in vLLM's interpreter; they import nothing of this package."""
