"""What a step takes over plain's by kind, by means and by medians: which of them add up.

Offline, on the Phase A cell at ref_safe of a study with a step probe. The whole step, its hooks and
what lies outside them, less plain's: by means the two are the step, by medians something is left.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import study_parser
from connector_tax.analysis.ingest import load_cells
from connector_tax.analysis.steps import Steps, read_steps
from connector_tax.artifacts import paths
from connector_tax.artifacts.record_reader import read_record
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.tables import KINDS
from connector_tax.commands import run_command
from connector_tax.files import ArtifactError

WAYS: dict[str, Callable[[np.ndarray], np.floating]] = {"mean": np.mean, "median": np.median}


def parts(steps: Steps, kind: str) -> np.ndarray | None:
    """Step, hooks and the time outside them, a line for each of WAYS; None without such steps."""
    engine_us = steps.table["engine_step_us"].to_numpy()
    kept = (steps.table["kind"] == kind).to_numpy() & ~np.isnan(engine_us)
    if not kept.any():
        return None
    own = [us for hook, us in steps.hooks.items() if not hook.child]
    hooks = np.sum(own, axis=0) if own else np.zeros(len(kept))
    samples = (engine_us, hooks, engine_us - hooks)
    return np.array([[way(sample[kept]) for sample in samples] for way in WAYS.values()])


def explain(study_file: Path) -> None:
    """Print a row for each kind of step and configuration.

    Raises:
        ArtifactError: Phase A has no valid cell at ref_safe, or a file is not what it was.
    """
    study = load_study(study_file)
    rate = read_record(study.root / paths.REFERENCE_RATES, RatesRecord)["ref_safe"]
    cells = [c for c in load_cells(study, "A", None) if (c.status, c.rate_rps) == ("valid", rate)]
    if not cells:
        raise ArtifactError(f"{study_file}: no valid cell at ref_safe in Phase A")
    launches = [(cell.configuration, cell.key.block, read_steps(cell)) for cell in cells]
    table = Table("steps", "configuration", "of launches", "step", "hooks", "outside", "neither")
    for kind in KINDS:
        known = [(c, b, found) for c, b, s in launches if (found := parts(s, kind)) is not None]
        plain = {
            b: [p for c, at, p in known if (c, at) == (study.baseline, b)] for _, b, _ in known
        }
        for config in study.configurations:
            over = [p - np.mean(plain[b], axis=0) for c, b, p in known
                    if c == config != study.baseline and plain[b]]  # fmt: skip
            for name, (step, hooks, outside) in zip(
                WAYS, np.mean(over, axis=0) if over else (), strict=False
            ):
                numbers = (step, hooks, outside, step - hooks - outside)
                table.add_row(kind, config, name, *(f"{us:+,.0f}" for us in numbers))
    Console(width=110).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Split the steps of a study by means and by medians, in us over plain's."""
    parser = study_parser("steps", main.__doc__)
    return run_command(parser, argv, lambda given: explain(given.study))


if __name__ == "__main__":
    sys.exit(main())
