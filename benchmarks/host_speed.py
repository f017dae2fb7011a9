"""Measure a decode step's cost on a host whose speed changes every half second.

Reads the step logs of a study's Phase A. A step counts if one request was decoded in it and in the
next step; its duration ends at the next step's beginning. The same core's time for schedule(),
without the hook inside it, shows the host's speed. Within a launch both are correlated, and their
slope adjusts steps to one speed. A connector also prolongs schedule() itself, so the adjustment
removes its effect on the whole engine core and gives a lower bound. The last column keeps that
effect, if each configuration's fastest half seconds come from an equally fast host.

Remeasured cells count with both measurements. `--picture` draws the half seconds.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import parser_of
from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.artifacts.cell_records import StepLine
from connector_tax.artifacts.names import baseline_of, configuration_of, launched_plains
from connector_tax.artifacts.study_file import launches, read_study
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.commands import run_command
from connector_tax.figures import style
from connector_tax.files import ArtifactError, read_jsonl
from connector_tax.marks import marks_of

HALF_SECOND_NS = 500_000_000
# Least steps in a half second for a median, and the longest time between steps without idling.
ENOUGH, IDLE_US = 40, 20_000
FASTEST = 0.02


def _alone(step: StepLine) -> bool:
    return step["decode_tokens"] == 1 and step["prefill_tokens"] == 0


def _steps(file: Path) -> Iterable[tuple[int, float, float]]:
    """Yield (half_second, step_us, schedule_us) of each step that decodes one request alone.

    `half_second` is the number of half seconds from the first step to this one.
    """
    scheduler_steps: list[StepLine] = [
        step for step in read_jsonl(file) if step["process"] == "scheduler"
    ]
    for step, following in itertools.pairwise(scheduler_steps):
        step_us = (following["t_ns"] - step["t_ns"]) / 1e3
        if _alone(step) and _alone(following) and step_us < IDLE_US:
            # The only hook inside schedule(); the others run when the step's output is taken in.
            hook_us = step["build_meta_us"] or 0.0
            half_second = (step["t_ns"] - scheduler_steps[0]["t_ns"]) // HALF_SECOND_NS
            yield half_second, step_us, step["step_duration_us"] - hook_us


def half_seconds(study_file: Path, cell: str) -> pd.DataFrame:
    """Return the median `step` and `schedule` (log us) of each half second of each launch."""
    rows = []
    for launch in launches(read_study(study_file), "A"):
        folder = launch.folder(study_file.parent)
        for file in sorted(folder.glob(f"{cell}*/engine_step_*.jsonl")):
            name = (launch.config, launch.block, file.parent.name)
            rows += [(*name, *step) for step in _steps(file)]
    if not rows:
        raise ArtifactError(f"{study_file}: cells {cell}* contain no step with a single request")
    columns = ["config", "block", "measurement", "half_second", "step", "schedule"]
    grouped = pd.DataFrame(rows, columns=columns).groupby(columns[:4])
    medians = grouped.median()[grouped.size() >= ENOUGH].map(np.log).reset_index()
    return medians.assign(configuration=medians["config"].map(configuration_of))


def adjusted(frame: pd.DataFrame, baseline: str) -> tuple[pd.DataFrame, float, float]:
    """Return launch medians in log us, measured and adjusted to one speed, with slope and r."""
    times = frame[["step", "schedule"]]
    within_block = times - times.groupby([frame["config"], frame["block"]]).transform("mean")
    step, schedule = within_block.to_numpy().T
    slope = float(step @ schedule / (schedule @ schedule))
    r = float(np.corrcoef(step, schedule)[0, 1])
    by_configuration = frame.groupby("configuration")["schedule"]
    floors = by_configuration.quantile(FASTEST, interpolation="nearest")
    held = frame[["configuration", "config", "block", "step"]].assign(
        one=frame["step"] - slope * (frame["schedule"] - floors[baseline]),
        each=frame["step"] - slope * (frame["schedule"] - frame["configuration"].map(floors)),
    )
    medians = held.groupby(["configuration", "config", "block"]).median().reset_index()
    return medians, slope, r


def _print(study: StudyDocument, frame: pd.DataFrame) -> None:
    baseline = baseline_of(study["config"])
    by_launch, slope, r = adjusted(frame, baseline)
    table = Table(title=f"{study['study']}: a decode step of one request alone", box=None)
    ways = {
        "step": "as measured",
        "one": "at one schedule()",
        "each": "at their fastest",
    }
    for column in ("configuration", "launches", *ways.values()):
        table.add_column(column, justify="right")
    places = list(map(LaunchId, by_launch["config"], by_launch["block"]))
    launched = {way: Launches.of(dict(zip(places, by_launch[way], strict=True))) for way in ways}
    others = sorted({*by_launch["configuration"]} - {baseline})
    for name in (baseline, *others):
        launches_of = by_launch[by_launch["configuration"] == name]
        taxes = [
            _tax_words(of, name, baseline, study["config"]["statistics"]["confidence"])
            for of in launched.values()
        ]
        table.add_row(name, str(len(launches_of)), *taxes)
    Console(width=150).print(table)
    print(f"log step time by log schedule() time, within launches: slope {slope:.2f}, r {r:.2f}")


def _tax_words(launched: Launches, name: str, baseline: str, confidence: float) -> str:
    """Return as text the baseline's mean and spread, or a difference from it with its interval."""
    plain = launched.y[launched.config == baseline]
    us = np.exp(plain.mean())
    if name == baseline:
        return f"{us:,.0f} us, sd {plain.std(ddof=1):.1%}"
    plains = launched_plains(launched.name.tolist(), baseline)
    estimate = launched.contrast(name, plains)
    if estimate is None or not estimate.repeats:
        return "no interval"
    low, high = estimate.interval(confidence)
    return f"{us * estimate.point:+.0f} us, {estimate.point:+.1%} [{low:+.1%}, {high:+.1%}]"


def _times(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """Return a configuration's schedule() and step times in us, one pair per half second."""
    of = frame.loc[frame["configuration"] == name, ["schedule", "step"]]
    return np.array(np.exp(of.to_numpy().T))


def _draw(study: StudyDocument, frame: pd.DataFrame, file: Path) -> None:
    """Draw a point per half second, and the baseline's slope, along which steps have equal cost."""
    baseline = baseline_of(study["config"])
    _, slope, _ = adjusted(frame, baseline)
    figure = Figure(figsize=(style.COLUMN_IN, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("the scheduler's own time for a step, without its hook (µs)")
    axes.set_ylabel("time from one decode step to the next (ms)")
    labels = {item["id"]: item["label"] for item in study["configurations"]}
    for name, mark in marks_of(labels).items():
        x, y = _times(frame, name)
        if x.size:
            look = style.marker_style(mark)
            axes.plot(x, y / 1e3, ls="", ms=2.4, alpha=0.7, label=labels[name], **look)
    x, y = _times(frame, baseline)
    schedule = frame["schedule"].to_numpy()
    ends = np.exp([schedule.min(), schedule.max()])
    line = np.median(y / 1e3 / x**slope) * ends**slope
    axes.plot(ends, line, color=style.MUTED, lw=0.6, zorder=0, label=f"slope {slope:.2f}")
    for axis, (low, high) in ((axes.xaxis, ends), (axes.yaxis, axes.get_ylim())):
        style.log_ticks(axis, low, high)
    axes.xaxis.set_major_locator(MultipleLocator(10))
    figure.legend(loc="outside upper left", ncols=3, handletextpad=0.3, columnspacing=1)
    figure.savefig(file, dpi=200, metadata={"Software": None})


def _run(arguments: argparse.Namespace) -> None:
    study = read_study(arguments.study)
    frame = half_seconds(arguments.study, arguments.cell)
    _print(study, frame)
    if arguments.picture:
        _draw(study, frame, arguments.picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the decode steps of a study's configurations at one host speed."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    parser.add_argument("--cell", required=True, help="a cell of Phase A, such as r8")
    parser.add_argument("--picture", type=Path, help="a PNG to draw")
    return run_command(parser, argv, _run)


if __name__ == "__main__":
    sys.exit(main())
