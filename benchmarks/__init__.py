"""Benchmarks: commands that print one table with the machine on it. README.md lists them."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from connector_tax.machine import machine
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


def take_turns(
    module: str, doc: str | None, run: Callable[[int], Coroutine[Any, Any, None]]
) -> int:
    """Run a command whose contenders take turns, alone, as `run(rounds)`; its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each contender takes its turn (default 5)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: found {arguments.rounds}; allowed: at least 1")

    def main() -> None:
        print(machine("uvloop"), flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(arguments.rounds))

    return run_alone(main)
