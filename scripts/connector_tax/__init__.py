"""The connector-tax study: what an idle KV connector costs in vLLM, with error bars."""


def package_version() -> str:
    """This package's version; "not installed" in vLLM's environment, which has no metadata."""
    # Imported late: it takes 50 ms that every launch would spend before its server starts.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("connector-tax")
    except PackageNotFoundError:
        return "not installed"
