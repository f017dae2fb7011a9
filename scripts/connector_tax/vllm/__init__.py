"""Real vLLM: environments, launch commands, probes, no-op connector, tiny model.

Modules that run inside vLLM's environment (`step_probe`, `noop_connector`, `dummy_bootstrap`, the
CPU adapter) import only the standard library, vLLM and each other.
"""
