"""The command line of the benchmarks whose contenders take turns."""

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from connector_tax.machine import machine


def main(module: str, doc: str | None, run: Callable[[int], Coroutine[Any, Any, None]]) -> int:
    """Print the machine and run `run(rounds)` in an event loop; the process's exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each contender takes its turn (default 5)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: found {arguments.rounds}; allowed: at least 1")
    print(machine("uvloop"), flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(arguments.rounds))
    return 0
