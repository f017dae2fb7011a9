"""The connector-tax study: what an idle KV connector costs in vLLM, with error bars."""

from importlib.metadata import version

__version__ = version("connector-tax")
