"""Benchmarks: commands that print one table with the machine on it. README.md lists them."""

import argparse
import sys
from collections.abc import Callable
from pathlib import PurePath

from connector_tax.study.device import DeviceError, hold_devices


def run_alone(main: Callable[[], int | None]) -> int:
    """Run a command while nothing else is measured on this machine's CPUs; its exit status."""
    if {"-h", "--help"} & {*sys.argv}:
        return main() or 0
    try:
        with hold_devices(["cpu"]):
            return main() or 0
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command in this file."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{PurePath(module).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
