"""Benchmarks, each a command that prints a table and describes its machine; see README.md."""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import PurePath

from connector_tax.machine import cpu
from connector_tax.study.device import DeviceError, hold_devices


def run_alone(main: Callable[[], int | None]) -> int:
    """Run a command while holding the lock on this machine's CPUs; return its exit status."""
    if {"-h", "--help"} & {*sys.argv}:
        return main() or 0
    try:
        with hold_devices(["cpu"]):
            return main() or 0
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark module."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{PurePath(module).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def machine(*packages: str) -> str:
    """Return a table's header line: processor, kernel, Python, `packages`, load averages."""
    versions = "".join(f", {name} {metadata.version(name)}" for name in packages)
    one, five, _ = os.getloadavg()
    return (
        f"{cpu()}, Linux {platform.release()}, Python {platform.python_version()}{versions}; "
        f"load average {one:.1f} (1 min) {five:.1f} (5 min)"
    )
