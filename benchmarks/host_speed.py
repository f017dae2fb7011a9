"""What a decode step costs where the host's speed changes from one half second to the next.

Reads the step logs of a study's Phase A. A step counts where one request was decoded, in it and in
the next; its time is that to the next one's beginning. The same core's time for schedule(), less
the hooks in it, tells how fast the host was: within a launch the two go together, and by that slope
a step is held to one speed. It takes a connector to leave schedule() alone. Where another thread of
its makes all of the engine core slower, this adjustment takes that away; the last column leaves it
in, as far as a configuration's fastest half seconds are those of an equally fast host.

Cells that were measured again count with both measurements.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import stats

from connector_tax.artifacts.cell_records import StepLine
from connector_tax.artifacts.names import baseline_of
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError, read_jsonl

HALF_SECOND_NS = 500_000_000
# Steps in a half second whose median says something; between two of them the engine was not idle.
ENOUGH, IDLE_US = 40, 20_000
FASTEST = 0.02


def _alone(step: StepLine) -> bool:
    return step["decode_tokens"] == 1 and step["prefill_tokens"] == 0


def _steps(file: Path) -> Iterable[tuple[int, float, float]]:
    """Of each decode step of one request: its half second, its time and schedule()'s, us."""
    ours: list[StepLine] = [step for step in read_jsonl(file) if step["process"] == "scheduler"]
    for step, following in itertools.pairwise(ours):
        step_us = (following["t_ns"] - step["t_ns"]) / 1e3
        if _alone(step) and _alone(following) and step_us < IDLE_US:
            hooks_us = sum(step.get("hooks_us", {}).values())
            half_second = (step["t_ns"] - ours[0]["t_ns"]) // HALF_SECOND_NS
            yield half_second, step_us, step["step_duration_us"] - hooks_us


def half_seconds(study_file: Path, cell: str) -> pl.DataFrame:
    """A row each: configuration, launch, and the medians of `step` and `schedule` (log us)."""
    rows = []
    for launch in launches(read_study(study_file), "A"):
        folder = launch.folder(study_file.parent)
        for file in sorted(folder.glob(f"{cell}*/engine_step_*.jsonl")):
            name = (launch.configuration, launch.name, file.parent.name)
            rows += [(*name, *step) for step in _steps(file)]
    if not rows:
        raise ArtifactError(f"{study_file}: no step of one request alone in cells {cell}*")
    columns = ["configuration", "launch", "measurement", "half_second", "step", "schedule"]
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    grouped = frame.group_by(columns[:4]).agg(pl.len(), pl.col("step", "schedule").median().log())
    return grouped.filter(pl.col("len") >= ENOUGH)


def adjusted(frame: pl.DataFrame, baseline: str) -> tuple[pl.DataFrame, float, float]:
    """Medians of each launch, log us, as measured and at one speed; the slope and r for that."""
    own = pl.col("step", "schedule") - pl.col("step", "schedule").mean().over("launch")
    step, schedule = frame.select(own).to_numpy().T
    slope = float(step @ schedule / (schedule @ schedule))
    r = float(np.corrcoef(step, schedule)[0, 1])
    floor = pl.col("schedule").quantile(FASTEST)
    fastest = frame.filter(configuration=baseline).select(floor).item()
    held = frame.select(
        "configuration", "launch", "step",
        own=floor.over("configuration"),
        one=pl.col("step") - slope * (pl.col("schedule") - fastest),
        each=pl.col("step") - slope * (pl.col("schedule") - floor.over("configuration")),
    )  # fmt: skip
    medians = pl.col("own", "step", "one", "each").median()
    return held.group_by("configuration", "launch").agg(medians), slope, r


def _print(title: str, frame: pl.DataFrame, baseline: str) -> None:
    by_launch, slope, r = adjusted(frame, baseline)
    table = Table(title=f"{title}: a decode step of one request alone", box=None)
    ways = {"step": "as measured", "one": "at one schedule()", "each": "at each one's fastest"}
    for column in ("configuration", "launches", "fastest schedule()", *ways.values()):
        table.add_column(column, justify="right")
    plain = by_launch.filter(configuration=baseline)
    others = by_launch.filter(pl.col("configuration") != baseline)
    for mine in [plain, *others.partition_by("configuration", maintain_order=True)]:
        name, floor = mine["configuration"][0], np.exp(mine["own"][0])
        said = [
            _said(mine[way].to_numpy(), plain[way].to_numpy(), name == baseline) for way in ways
        ]
        table.add_row(name, str(len(mine)), f"{floor:.0f} us", *said)
    Console(width=150).print(table)
    print(f"step over schedule(), logs, within launches: slope {slope:.2f}, r {r:.2f}")


def _said(mine: NDArray[np.float64], plain: NDArray[np.float64], is_plain: bool) -> str:
    if is_plain:
        return f"{np.exp(plain.mean()):,.0f} us, sd {plain.std(ddof=1):.1%}"
    low, high = stats.ttest_ind(mine, plain).confidence_interval()
    middle = mine.mean() - plain.mean()
    us = np.exp(plain.mean()) * np.expm1(middle)
    return f"{us:+.0f} us, {np.expm1(middle):+.1%} [{np.expm1(low):+.1%}, {np.expm1(high):+.1%}]"


def _run(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    frame = half_seconds(arguments.study, arguments.cell)
    _print(study["study"], frame, baseline_of(study["config"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the decode steps of a study's configurations at one speed of the host."""
    parser = study_parser("host_speed", __doc__)
    parser.add_argument("--cell", required=True, help="of Phase A, such as r8")
    return run_command(parser, argv, _run)


if __name__ == "__main__":
    sys.exit(main())
