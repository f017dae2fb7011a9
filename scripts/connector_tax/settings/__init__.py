"""Settings that vLLM resolves for a model and a connector, without a server, weights or a GPU."""
