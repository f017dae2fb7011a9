"""Load generator for OpenAI-compatible endpoints; answers are stamped as their bytes arrive."""
