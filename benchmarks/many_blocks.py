"""`python -m benchmarks.many_blocks`: what a study of many blocks costs outside of its devices.

The default study cut down to three configurations, one shape and as many blocks as asked for is
simulated (connector_tax.rehearsal), in a folder like that of a measured study without step logs,
each block on a device of its own. Then its analysis runs, in a process of its own, and Snakemake
plans it from the start.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks import run_alone
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index, write_index
from connector_tax.artifacts.names import PHASES
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import DEFAULTS, ROOT, filled, load_yaml
from connector_tax.machine import machine
from connector_tax.rehearsal.machine import machine_of
from connector_tax.rehearsal.study import rehearse
from connector_tax.study.design import resolve

NAMES = ["plain", "noop_connector", "mooncake_both"]
# A process's own peak: that of getrusage begins with the process which started it.
PEAK = """
import runpy, sys
from connector_tax.loadgen.worker import peak_memory_mb
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print(peak_memory_mb(), file=sys.stderr)
"""


def config_of(blocks: int) -> dict[str, Any]:
    """The default study cut down: 15 cells in each block."""
    config: dict[str, Any] = filled(load_yaml(DEFAULTS / "config.yaml"), "config")
    small: dict[str, Any] = {"study": "many-blocks", "blocks": blocks, "configurations": NAMES}
    small["phase_b"] = {"input_tokens": [128], "output_tokens": [16]}
    return {**config, **small}


def name_devices(study: StudyDocument, root: Path) -> None:
    """Have the launches say what they ran on, as measured ones do: each block on another device."""
    for launch in (launch for phase in PHASES for launch in launches(study, phase)):
        folder = launch.folder(root)
        index = read_index(folder)
        assert index is not None
        device = {"machine": f"m{launch.block}", "devices": ["gpu"], "gpus": []}
        node = {**device, "cpu": "simulated", "cpus": "0", "quota_cpus": None}
        write_index(folder, msgspec.structs.replace(index, attempts=[{"node": node}]))


def timed(module: str, *arguments: str) -> tuple[float, float]:
    """Seconds and peak resident memory (GiB) of `python -m module`.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, module, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return time.monotonic() - begun, float(done.stderr.split()[-1]) / 1024


def row(blocks: int, folder: Path) -> list[str]:
    """Simulate, analyse and plan a study of this many blocks; a row of the table."""
    config = config_of(blocks)
    study = resolve(config, "many_blocks")
    root = folder / "results" / config["study"]
    root.mkdir(parents=True)
    begun = time.monotonic()
    rehearse(study, machine_of(study), root)
    simulated_s = time.monotonic() - begun
    name_devices(study, root)
    runs = [path for path in (root / paths.RUNS).rglob("*") if path.is_file()]
    mib = sum(path.stat().st_size for path in runs) / 2**20
    statistics = ("connector_tax.analysis.aggregate", "--study", str(root / paths.STUDY))
    analysis_s, analysis_gib = timed(*statistics)
    # Of a folder without results: every job is planned.
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    root.rename(folder / "simulated")
    where = ("--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder))
    configured = ("--configfile", str(folder / "study.yaml"), "--", "all")
    plan_s, plan_gib = timed("snakemake", "--cores", "1", "--dry-run", *where, *configured)
    numbers = (simulated_s, analysis_s, analysis_gib, plan_s, plan_gib)
    return [str(blocks), str(len(runs)), f"{mib:.0f}", *(f"{number:.3g}" for number in numbers)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each number of blocks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_blocks", description=main.__doc__
    )
    parser.add_argument("blocks", type=int, nargs="*", default=[8, 64, 512])
    arguments = parser.parse_args(argv)
    print(machine("polars", "snakemake"))
    print("| blocks | files | MiB | simulated, s | analysis, s | GiB | plan, s | GiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for blocks in arguments.blocks:
        with tempfile.TemporaryDirectory(prefix="many-blocks-") as folder:
            print(f"| {' | '.join(row(blocks, Path(folder)))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
