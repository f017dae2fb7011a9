"""The words of a study: phases, states, launch and cell names, metrics, reference rates.

A block holds each configuration once, under its id, and plain `plain_launches` times, under the
names `plain`, `plain_2`, `plain_3` and so on.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# The rate sweep, the shapes at ref_safe, the shapes at ref_load; in the order they run.
PHASES = ("A", "B", "Bp")
LAUNCH_STATUSES = ("done", "skipped", "failed")
CELL_STATUSES = ("valid", "void", "skipped", "missing")
REQUEST_STATUSES = ("ok", "error", "timeout", "cancelled", "dropped")
PLAIN = "plain"
METRICS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p90")
REFERENCES = ("ref_safe", "ref_load")
# `plain_last` in studies measured before `plain_launches` existed.
_FURTHER_PLAIN = re.compile(rf"{PLAIN}_(\d+|last)")


@dataclass(frozen=True, slots=True)
class Launch:
    """One server launch of a block and a phase; `config` is its name there, such as `plain_2`."""

    config: str
    block: int
    phase: str

    @property
    def configuration(self) -> str:
        """The configuration the server is started with."""
        return configuration_of(self.config)

    @property
    def name(self) -> str:
        """The path-like name that seeds are derived from."""
        return f"{self.config}/block{self.block}/{self.phase}"

    def folder(self, study_folder: Path) -> Path:
        """Where the launch's artifacts live."""
        return study_folder / "runs" / self.name


class CellKey(NamedTuple):
    """Where a cell stands: launch name (`nixl_both`, `plain_2`), block, phase, cell name."""

    config: str
    block: int
    phase: str
    cell: str


def plain_names(launches: int) -> list[str]:
    """The names of plain's launches in a block."""
    return [PLAIN, *(f"{PLAIN}_{number}" for number in range(2, launches + 1))]


def configuration_of(name: str) -> str:
    """The configuration a launch is started with; no configuration's id is like `plain_2`."""
    return PLAIN if _FURTHER_PLAIN.fullmatch(name) else name


def launched_plains(names: Iterable[str]) -> list[str]:
    """The launches of plain among launch names, each once, in the order of their numbers."""
    plains = {name for name in names if configuration_of(name) == PLAIN}
    return sorted(plains, key=lambda name: (len(name), name))


def cell_of_rate(rate_rps: float) -> str:
    """`r0.5`, `r4`: the name of a Phase A cell."""
    return f"r{rate_rps:g}"


def cell_of_shape(input_tokens: int, output_tokens: int) -> str:
    """`512x64`: the name of a cell of Phases B and B'."""
    return f"{input_tokens}x{output_tokens}"
