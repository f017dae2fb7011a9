"""Resolve vLLM's settings for a model and a connector, without a server, weights or a GPU."""
