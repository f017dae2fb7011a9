"""Time two commands for developers: a replot of each archive, a dry run of the default study.

Each checkout has its own `.venv`. Checkouts take turns, so that all see the same machine. CPU time
is of all processes, peak memory of the largest one.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import parser_of, run_alone
from connector_tax.commands import run_command
from connector_tax.config import ROOT
from connector_tax.files import ArtifactError
from connector_tax.provenance.archive import read_head


class Usage(NamedTuple):
    """The time and memory of one run."""

    cpu_s: float
    wall_s: float
    peak_mib: float


def usage_of(checkout: Path, arguments: Sequence[str]) -> Usage:
    """Run a checkout's Snakemake in an empty folder; return its time and memory.

    Raises:
        ArtifactError: the checkout has no Snakemake, or the command fails; the text contains its
        output.
    """
    snakemake = checkout / ".venv" / "bin" / "snakemake"
    if not snakemake.exists():
        raise ArtifactError(f"{snakemake}: missing; run `make .venv/pipeline.stamp` in {checkout}")
    with tempfile.TemporaryDirectory(prefix="waiting-") as folder, tempfile.TemporaryFile() as log:
        shutil.copy(checkout / "MANIFEST.md", folder)
        command = [str(snakemake), "--cores", "1", "--directory", folder, *arguments]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=checkout, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - began
        if process.returncode:
            log.seek(0)
            raise ArtifactError(f"{' '.join(command)}: failed\n{log.read().decode()}")
    return Usage(used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss / 1024)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the medians of several runs of each command in each checkout."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", default=[ROOT])
    parser.add_argument("--archive", type=Path, action="append", help="replot it; several times")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (%(default)s)")
    return run_command(parser, argv, _compare, label="waiting: ")


def _compare(arguments: argparse.Namespace) -> None:
    shipped = [ROOT / f"results/archive/{name}.tar.zst" for name in ("default", "vllm-cpu")]
    commands = {"snakemake -n all": ["-n", "all"]}
    for archive in arguments.archive or shipped:
        name = f"replot of {read_head(archive)['study']}"
        commands[name] = ["replot", "--config", f"archive={archive.resolve()}"]
    table = Table("command", "checkout", "CPU s", "wall s", "peak MiB", "CPU s of each run")
    for name, words in commands.items():
        runs = dict[Path, list[Usage]]()
        for _ in range(arguments.runs):
            for checkout in arguments.checkouts:
                runs.setdefault(checkout, []).append(usage_of(checkout.resolve(), words))
        for checkout, of in runs.items():
            cpu_s, wall_s, peak_mib = map(statistics.median, zip(*of, strict=True))
            each = " ".join(f"{usage.cpu_s:.1f}" for usage in of)
            row = (f"{cpu_s:.2f}", f"{wall_s:.2f}", f"{peak_mib:.0f}", each)
            table.add_row(name, str(checkout), *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(run_alone(main))
