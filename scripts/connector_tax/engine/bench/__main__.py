"""`python -m connector_tax.engine.bench batching|serving`: the engine's benchmarks."""

import argparse
import asyncio
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import uvloop

_BENCHMARKS = ("batching", "serving")


def machine() -> str:
    """The machine in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "?")
    one, five, _ = os.getloadavg()
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python "
        f"{platform.python_version()}, uvloop {version('uvloop')}; load average {one:.1f} (1 min) "
        f"{five:.1f} (5 min) before the run"
    )


def main() -> int:
    """Run one benchmark; the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.engine.bench", description=__doc__
    )
    parser.add_argument("benchmark", choices=_BENCHMARKS)
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each contender takes its turn (default 5)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds: found {arguments.rounds}; allowed: at least 1")
    print(machine(), flush=True)
    benchmark = import_module(f"connector_tax.engine.bench.{arguments.benchmark}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(benchmark.run(arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
