"""Real vLLM: environments, launch commands, step probe, no-op connector, tiny model, doctor.

What runs inside vLLM's own environment (`step_probe`, `noop_connector`,
`dummy_bootstrap`, the CPU adapter) imports the standard library, vLLM and each other, no more.
"""
