"""The names in a study: phases, states, launches, cells, metrics, reference rates.

A block holds each configuration once, under its id, and the baseline `plain_launches` times, under
the names `plain`, `plain_2`, `plain_3` and so on if its id is `plain`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import Reference, StudyConfig


# The rate sweep, the shapes at ref_safe, the shapes at ref_load; in run order.
PHASES = ("A", "B", "Bp")
# The Snakemake rule that measures each.
PHASE_RULES = {"A": "phase_a", "B": "phase_b", "Bp": "phase_bp"}
# How requests end: those that fail, and all.
FAILED = ("error", "timeout", "cancelled")
REQUEST_STATUSES = ("ok", *FAILED, "dropped")
# The kinds of failures of requests that a server left unanswered.
UNANSWERED = ("request_timeout", "drain_timeout")
# The configuration without a connector, which is the default baseline.
PLAIN = "plain"
NOOP = "noop_connector"
# The kind of schedule that uses a trace's times.
TRACE = "trace"
# The kind of a closed loop, which keeps a number of requests in flight without a schedule.
CLOSED = "closed"
# Phase -> its reference rate.
REFERENCE_OF: Mapping[str, Reference] = {"B": "ref_safe", "Bp": "ref_load"}
REFERENCES = tuple(REFERENCE_OF.values())
# Why Phase B' is skipped.
SAME_RATES = "ref_load equals ref_safe"
# The tax over all rates of Phase A without saturation, as a cell and as a reference.
ALL_RATES = "all_rates"
# The candidate of an `ab` without a name; its label shows how its command differs.
UNNAMED = "candidate"
# Suffix that no configuration id may have.
_FURTHER_LAUNCH = re.compile(r"(.+)_([2-9]|1\d|20)")


@dataclass(frozen=True, slots=True)
class Launch:
    """One server launch of a block and a phase; `config` is its name there, such as `plain_2`."""

    config: str
    block: int
    phase: str

    @property
    def configuration(self) -> str:
        """Return the configuration of the launch's server."""
        return configuration_of(self.config)

    @property
    def name(self) -> str:
        """Return the path-like name from which seeds are derived."""
        return f"{self.config}/block{self.block}/{self.phase}"

    def folder(self, study_folder: Path) -> Path:
        """Return the folder of the launch's artifacts."""
        return study_folder / "runs" / self.name


class CellKey(NamedTuple):
    """The identity of a cell: launch name (`nixl_both`, `plain_2`), block, phase, cell name."""

    config: str
    block: int
    phase: str
    cell: str


def baseline_of(config: StudyConfig) -> str:
    """Return the configuration that a study's taxes are measured against."""
    return config.get("baseline", PLAIN)


def members_of(config: StudyConfig, phase: str) -> list[str]:
    """Return the configurations that a phase measures."""
    everyone = config["configurations"]
    if phase == "Bp":
        return config["phase_bp"]["configurations"]
    return config["phase_b"].get("configurations", everyone) if phase == "B" else everyone


def plain_names(launches: int, baseline: str = PLAIN) -> list[str]:
    """Return the names of the baseline's launches in a block."""
    return [baseline, *(f"{baseline}_{number}" for number in range(2, launches + 1))]


def configuration_of(name: str) -> str:
    """Return the configuration that a launch's name belongs to: `plain` for `plain_2`."""
    further = _FURTHER_LAUNCH.fullmatch(name)
    return further[1] if further else name


def launched_plains(names: Iterable[str], baseline: str = PLAIN) -> list[str]:
    """Return the names that belong to the baseline, without duplicates, in order of number."""
    plains = {name for name in names if configuration_of(name) == baseline}
    return sorted(plains, key=lambda name: (len(name), name))


def cell_of_rate(rate_rps: float) -> str:
    """Return the name of a Phase A cell, such as `r0.5` or `r4`."""
    return f"r{rate_rps:g}"


def cell_of_shape(input_tokens: int, output_tokens: int) -> str:
    """Return the name of a cell of Phases B and B', such as `512x64`."""
    return f"{input_tokens}x{output_tokens}"


def no_number(metric: str, output_tokens: int) -> str:
    """Return why a valid cell has no value for a metric."""
    if metric == "goodput":
        return "no goodput: no request was within its limits"
    if output_tokens == 1:
        return f"no {metric} in a cell of 1 output tokens"
    return f"no {metric}: too few requests, or 0 where all tokens of many came in one read"
