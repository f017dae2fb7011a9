"""The embedded engine: a server with vLLM's API whose true timing and connector taxes are known."""
