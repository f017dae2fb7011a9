"""Which bound a gate can decide, with how many blocks and in how much time: from a pilot study."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.stats import t as student

from connector_tax import text
from connector_tax.analysis.block_model import POWER, Estimate
from connector_tax.artifacts import tables
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import MIN_BLOCKS_FOR_VERDICT
from connector_tax.compare.contrast import quantile
from connector_tax.compare.page import markdown_table
from connector_tax.compare.rows import effect_side
from connector_tax.figures.tables import StudyTables
from connector_tax.study.plan import expected_cell_s, known_durations, launch_overhead_s

BLOCKS = range(MIN_BLOCKS_FOR_VERDICT, 11)


def decided_bound(error: float, df: float, confidence: float) -> float:
    """The smallest bound that a study without any tax passes in POWER of its repetitions."""
    reach = quantile(confidence, df) + float(student.ppf(POWER, df))
    return float(np.expm1(reach * error))


def block_minutes(study: StudyTables) -> float:
    """Expected minutes of one block of Phase A."""
    config = study.settings
    launched = sum(entry["block"] == 0 for entry in study.document["run_order"]["A"])
    cells = sum(expected_cell_s(config, c["rate_rps"]) for c in study.document["cells"]["A"])
    known = known_durations(study.document, study.root)
    return float(launched * (launch_overhead_s(study.document, study.root, known) + cells) / 60)


def yardstick_spread(study: StudyTables, at: str) -> float | None:
    """How much the machine's memory latency differed between launches: standard deviation of logs.

    None where the machine was not watched in two launches of that cell.
    """
    cell = study.cell_at(at)
    seen = [
        math.log(row.memory_ns_p50)
        for row in study.cell_rows
        if (row.phase, row.cell) == ("A", cell) and row.block != tables.POOLED and row.memory_ns_p50
    ]
    return float(np.std(seen, ddof=1)) if len(seen) > 1 else None


def plan_lines(
    study: StudyTables, configs: Sequence[str], metrics: Sequence[str], at: str
) -> Iterator[str]:
    """A Markdown table of the bounds decided with more blocks, from this study as a pilot."""
    estimates = {
        f"{config} {metric}": estimate
        for config in configs
        for metric in metrics
        if (estimate := pilot_estimate(study, config, metric, at)) is not None
    }
    confidence = 1 - (1 - study.settings["statistics"]["confidence"]) / max(1, len(estimates))
    launches = Study(study.root, study.document).configs("A")
    minutes = block_minutes(study)
    spread = yardstick_spread(study, at)
    plains = len(launches) - len(study.connectors)
    rows = []
    for blocks in BLOCKS:
        grown = [e.with_blocks(len(launches) - 1, blocks) for e in estimates.values()]
        bounds = [decided_bound(e.error or 0.0, e.df, confidence) for e in grown]
        if spread is not None:
            error = spread * math.sqrt((1 + 1 / plains) / blocks)
            bounds.append(decided_bound(error, (len(launches) - 1) * (blocks - 1), confidence))
        told = [text.percent(bound) for bound in bounds]
        rows.append([str(blocks), f"{blocks * minutes:.0f}", *told])
    yield ""
    yield f"Bounds that {POWER:.0%} of studies without a tax would pass, from this one as a pilot:"
    yield ""
    yard = [] if spread is None else ["the yardstick's part"]
    yield from markdown_table(["blocks", "minutes", *estimates, *yard], rows)
    yield ""


def pilot_estimate(study: StudyTables, config: str, metric: str, at: str) -> Estimate | None:
    """The tax's estimate as its printed interval has it; None without an interval."""
    row = study.at(at, metric).get(config)
    side = effect_side(row, study.settings["statistics"]["confidence"])
    if row is None or isinstance(side, str) or side.known.error is None:
        return None
    known = side.known
    return Estimate(known.point, known.error, known.df, tuple(range(side.blocks)))
