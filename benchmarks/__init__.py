"""Benchmarks: commands that print one table with the machine on it. README.md lists them."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

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


def study_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.<module> --study FILE`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    return parser
