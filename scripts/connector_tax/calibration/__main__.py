"""Calibrate the pipeline: virtual studies, studies over real HTTP, injected faults, a report."""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console

from connector_tax.calibration import coverage, fault_table, http_studies, report
from connector_tax.calibration.design import ARRIVALS, SPREADS, study_document
from connector_tax.calibration.virtual import true_taxes
from connector_tax.files import ArtifactError, write_json
from connector_tax.machine import machine
from connector_tax.rehearsal.processes import SimulationError, in_processes
from connector_tax.study.device import DeviceError

BLOCKS = (3, 5)
# Launches of one task for the true taxes.
TRUTH_SHARE = 50
SIMULATE = "connector_tax.calibration.virtual"


class Scale(NamedTuple):
    """How much is run.

    Attributes:
        studies: virtual studies for each spread and arrival process.
        http_studies, http_blocks: studies over HTTP and the blocks of each.
        faults: names of the fault cases; None: all.
        spreads: of the virtual studies.
    """

    studies: int
    http_studies: int
    http_blocks: int
    faults: tuple[str, ...] | None
    spreads: Sequence[str] = SPREADS

    @property
    def truth_launches(self) -> int:
        """Launches behind a true tax, each with a cell of the studies' length."""
        return 3 * self.studies


FULL = Scale(300, 10, 3, None)
SHORT = Scale(2, 1, 1, ("fin", "prefix_hit", "crlf", "refuse_start"))
Say = Callable[[str], None]


def virtual(_: Path, scale: Scale, seed: int, say: Say) -> dict[str, Any]:
    """Studies in virtual time: how often intervals cover, and what is found."""
    truths: dict[str, coverage.Taxes] = {}
    for arrivals in ARRIVALS:
        say(f"virtual: true taxes, {arrivals} arrivals, from {scale.truth_launches} launches")
        config = study_document(arrivals, seed, 1)["config"]
        starts = range(0, scale.truth_launches, TRUTH_SHARE)
        tasks = [
            ("truth", config, k, min(TRUTH_SHARE, scale.truth_launches - k), seed) for k in starts
        ]
        truths[arrivals] = true_taxes(in_processes(SIMULATE, [], tasks))
    rows: list[Any] = []
    for spread, arrivals in ((s, a) for s in scale.spreads for a in ARRIVALS):
        say(f"virtual: {scale.studies} studies, {spread}, {arrivals} arrivals")
        numbers = range(scale.studies)
        studies = [("study", spread, arrivals, number, seed, BLOCKS) for number in numbers]
        rows += chain.from_iterable(in_processes(SIMULATE, [], studies))
    table = coverage.with_truth(pd.DataFrame(rows), truths)
    return {"studies": scale.studies, "rows": coverage.summary(table)}


def http(folder: Path, scale: Scale, seed: int, say: Say) -> dict[str, Any]:
    """Studies over real HTTP, in an empty folder."""
    studies, blocks = scale.http_studies, scale.http_blocks
    found = http_studies.run(folder, studies, blocks, scale.truth_launches, seed, say)
    return {"studies": studies, "blocks": blocks, **found}


def faults(folder: Path, scale: Scale, seed: int, say: Say) -> dict[str, Any]:
    """Injected faults, in an empty folder."""
    return {"faults": fault_table.run(folder, scale.faults, seed, say)}


PARTS = {"virtual": virtual, "http": http, "faults": faults}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calibration and write its results and its report."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.calibration", description=main.__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("results/calibration"))
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--short", action="store_true", help="tens of seconds, few studies")
    words = "virtual studies for each spread and arrival process"
    parser.add_argument("--studies", type=int, help=words)
    words = "how launches differ in them"
    parser.add_argument("--spread", nargs="+", choices=SPREADS, default=SPREADS, help=words)
    parser.add_argument(
        "--only", choices=PARTS, help="run one part again; the others keep their results"
    )
    arguments = parser.parse_args(argv)
    say: Say = Console(stderr=True).print
    out, seed = arguments.out, arguments.seed
    scale = SHORT if arguments.short else FULL
    scale = scale._replace(spreads=arguments.spread)
    if arguments.studies is not None:
        scale = scale._replace(studies=arguments.studies)
    if scale.studies < 1:
        parser.error(f"--studies: found {scale.studies}; allowed: at least 1")
    try:
        for name in PARTS if arguments.only is None else (arguments.only,):
            shutil.rmtree(out / name, ignore_errors=True)
            part = PARTS[name](out / name, scale, seed, say)
            write_json(out / f"{name}.json", {"machine": machine(), "seed": seed, **part})
        print(report.write(out))
    except (ArtifactError, DeviceError, SimulationError) as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
