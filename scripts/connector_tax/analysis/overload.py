"""Cells whose latencies are those of survivors: saturated servers, and arrivals that were dropped.

Source: docs/method.md, "Verdicts". A tax from such a cell keeps its number, says so, and gets no
verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.reference import Sweep, judgement
from connector_tax.analysis.saturation import CellLoad
from connector_tax.artifacts.names import CellKey
from connector_tax.artifacts.study_file import Study


class Overload(NamedTuple):
    """What one valid cell of one launch says about overload.

    Attributes:
        configuration: what the launch was started with.
        saturated: by the study's criteria.
        dropped: measured arrivals dropped by the in-flight cap.
    """

    configuration: str
    saturated: bool
    dropped: int


def overloads(
    study: Study,
    cells: Sequence[Cell],
    loads: Mapping[CellKey, CellLoad],
    dropped: Mapping[CellKey, int],
    sweeps: Mapping[tuple[str, int], Sweep],
) -> dict[CellKey, Overload]:
    """What every valid cell in which something succeeded says about overload.

    Args:
        study: the study.
        cells: its planned cells.
        loads: the load figures of those cells.
        dropped: measured arrivals that were dropped, of the same.
        sweeps: `reference.judge_launches` of Phase A.
    """
    states = {}
    for cell in cells:
        if cell.key in loads and cell.rate_rps is not None:
            judged = judgement(study, cell.key, cell.rate_rps, loads[cell.key], sweeps)
            saturated = judged.saturated
            states[cell.key] = Overload(cell.configuration, saturated, dropped[cell.key])
    return states


def mark(cells: Iterable[Overload]) -> str:
    """What is wrong with the cells a tax is made from, a configuration at a time; "" for nothing.

    `mooncake_both saturated; plain dropped 65 arrivals`.
    """
    states: dict[str, list[Overload]] = {}
    for cell in cells:
        states.setdefault(cell.configuration, []).append(cell)
    parts = []
    for configuration, launches in states.items():
        if any(launch.saturated for launch in launches):
            parts.append(f"{configuration} saturated")
        if dropped := sum(launch.dropped for launch in launches):
            parts.append(f"{configuration} dropped {dropped} arrivals")
    return "; ".join(parts)


def joined(marks: Iterable[str]) -> str:
    """The marks of several taxes as one, each part once."""
    parts = [part for text in marks for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))
