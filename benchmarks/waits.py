"""How long requests wait for the engine's next step, and how long their first token takes after it.

Offline, on Phase B of a study with a step probe. The first token's time is cut where the step that
computes the prompt begins (the first with prompt tokens after the request's due time). With fixed
arrivals a request that comes while another decodes comes at nearly the same moment of a step each
time, another moment in each configuration: their waits differ by up to a step whatever a connector
costs (docs/decisions/quiet-time.md, "Fixed arrivals meet steps at one moment").
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scrapes import measured
from connector_tax.analysis.ingest import Cell, load_cells
from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import load_study
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError, read_jsonl


def parts(cell: Cell) -> tuple[float, float]:
    """Medians, in ms, of a cell's measured successes: before their prefill step, and after."""
    requests = measured(cell)
    due, first = requests["t_intended_ns"].to_numpy(), requests["t_first_token_ns"].to_numpy()
    prefills = np.array(
        [step["t_ns"] for step in read_jsonl(cell.file("engine_step")) if step["prefill_tokens"]]
    )
    begun = prefills[np.searchsorted(prefills, due)]
    return float(np.median(begun - due)) / 1e6, float(np.median(first - begun)) / 1e6


def explain(study_file: Path) -> None:
    """Print the table of a study: a row for each cell and configuration.

    Raises:
        ArtifactError: Phase B has no valid cell, or a file is not what it was.
    """
    study = load_study(study_file)
    rates = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)
    cells = [c for c in load_cells(study, "B", rates["ref_safe"]) if c.status == "valid"]
    if not cells:
        raise ArtifactError(f"{study_file}: no valid cell in Phase B")
    table = Table("cell", "configuration", "before the step, ms", "least to most", "after it, ms")
    for name, config in sorted({(cell.key.cell, cell.configuration) for cell in cells}):
        group = [c for c in cells if (c.key.cell, c.configuration) == (name, config)]
        before, after = np.array([parts(cell) for cell in group]).T
        span = f"{before.min():.2f} to {before.max():.2f}"
        table.add_row(name, config, f"{before.mean():.2f}", span, f"{after.mean():.2f}")
    Console(width=100).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Cut the first token's time where the step with its prompt begins."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description=main.__doc__)
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    return run_command(parser, argv, _run, (ArtifactError,))


def _run(arguments: argparse.Namespace) -> None:
    explain(arguments.study)


if __name__ == "__main__":
    sys.exit(main())
