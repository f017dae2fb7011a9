"""The connector-tax study: what an idle KV connector costs in vLLM, with error bars."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("connector-tax")
except PackageNotFoundError:
    # vLLM's own environment finds this package by PYTHONPATH, without its metadata.
    __version__ = "not installed"
