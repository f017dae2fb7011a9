"""The connector-tax study: what an idle KV connector costs in vLLM, with error bars."""

__version__ = "0.4.0.dev0"
