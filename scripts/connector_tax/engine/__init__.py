"""The embedded engine: a server that speaks vLLM, whose true timing and true tax are known."""
