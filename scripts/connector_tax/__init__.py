"""The connector-tax study: measure the cost of an idle KV connector in vLLM, with intervals."""

__version__ = "0.4.0"
