"""Looks while a study is measured: after a block, which configurations are decided.

A look takes the median of each launch, in the mean over the rates of Phase A at which nothing was
saturated, and compares configurations within blocks (docs/method.md, "The error model"). Its level
stands in `statistics.looks`, one for each look from the second block on; their sum is the family's.
Candidates and metrics share a level (Bonferroni).
"""

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from connector_tax.analysis.block_model import Launches, LaunchId
from connector_tax.analysis.effects import Effect, unsaturated
from connector_tax.artifacts import paths
from connector_tax.artifacts.index import read_index
from connector_tax.artifacts.looks import FIRST_LOOK, Finding, decided_in, read_looks
from connector_tax.artifacts.metrics import VERDICT_METRICS, margin_of
from connector_tax.artifacts.names import configuration_of, launched_plains
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.verdicts import CANNOT_TELL, MARKED, TOO_FEW, verdict_of
from connector_tax.files import read_json, write_json

End = float | None
# Of the interval, and of the one of the equivalence test; none where nothing repeats.
Ends = tuple[End, End, End, End]


def look(study: Study, blocks: int) -> list[Finding]:
    """What the first `blocks` blocks say; without an interval before FIRST_LOOK.

    Args:
        study: Phase A of its first blocks has ended.
    """
    statistics = study.config["statistics"]
    values, saturated = _launch_medians(study, blocks)
    margins = {metric: margin_of(statistics["margins"], metric) for metric in VERDICT_METRICS}
    return findings_of(
        values, study.baseline, [name for name in study.configurations if name != study.baseline],
        blocks, statistics["looks"], margins, saturated,
    )  # fmt: skip


def findings_of(
    values: Mapping[str, Mapping[LaunchId, float]],
    baseline: str,
    candidates: Sequence[str],
    blocks: int,
    levels: Sequence[float],
    margins: Mapping[str, float],
    saturated: Collection[str] = (),
) -> list[Finding]:
    """What the log medians of the launches say, by metric, of each candidate.

    Args:
        levels: of all looks; this one is after `blocks` blocks.
        saturated: the configurations that were, at a rate that counts or at all of them.
    """
    level = levels[max(blocks - FIRST_LOOK, 0)]
    findings = []
    for metric in VERDICT_METRICS:
        medians = Launches.of(values[metric])
        plains = launched_plains(medians.name.tolist(), baseline)
        base = medians.y[medians.config == baseline]
        base_ms = math.exp(base.mean()) if len(base) else None
        for config in candidates:
            marked = bool({config, baseline} & {*saturated})
            effect, needed = Effect.of(medians, config, plains, 1 - level), None
            ends: Ends = (None, None, None, None)
            verdict = CANNOT_TELL if effect is None else TOO_FEW
            if effect is not None and effect.repeats:
                wide, narrow = map(effect.interval, _shares(level, len(candidates)))
                ends, verdict = (*wide, *narrow), verdict_of(wide, narrow, margins[metric])
                if verdict == CANNOT_TELL and not marked:
                    shares = _shares(levels[-1], len(candidates))
                    estimate, margin = effect.estimate, margins[metric]
                    needed = estimate.blocks_needed(effect.added_df, margin, *shares)
            tax, said = None if effect is None else effect.point, MARKED if marked else verdict
            findings.append(Finding(config, metric, tax, *ends, said, base_ms, needed))
    return findings


def _launch_medians(study: Study, blocks: int) -> tuple[dict[str, dict[LaunchId, float]], set[str]]:
    """Mean log median of each launch by metric, and who was saturated at a rate that counts."""
    rows: dict[LaunchId, Mapping[str, Mapping[str, float | None]]] = {}
    for launch in launches(study.document, "A"):
        folder = launch.folder(study.root)
        index = read_index(folder) if launch.block < blocks else None
        if index is not None and index.status == "done":
            valid = {entry.cell for entry in index.cells if entry.status == "valid"}
            summary = read_json(folder / paths.SUMMARY)
            of_cells = {cell: row for cell, row in summary.items() if cell in valid}
            rows[LaunchId(launch.config, launch.block)] = of_cells
    least = study.config["saturation"]["throughput_ratio_min"]
    overloaded = [
        (launch.name, cell) for launch, of in rows.items() for cell, row in of.items()
        if _saturated(row, least)
    ]  # fmt: skip
    rates = {cell["cell"]: cell["rate_rps"] for cell in study.cells("A")}
    kept = unsaturated(rates, overloaded)
    values = {}
    for metric in VERDICT_METRICS:
        logs = {
            launch: [math.log(m) for c in kept if (m := row.get(c, {}).get(f"{metric}_ms"))]
            for launch, row in rows.items()
        }
        values[metric] = {
            launch: sum(of) / len(of) for launch, of in logs.items() if 0 < len(of) == len(kept)
        }
    counted = [name for name, cell in overloaded if cell in kept or not kept]
    return values, set(map(configuration_of, counted))


def _saturated(row: Mapping[str, float | None], least: float) -> bool:
    ratio = row["throughput_ratio"]
    return bool(row["dropped"]) or (ratio is not None and ratio < least)


def _shares(level: float, candidates: int) -> tuple[float, float]:
    """Confidence of the interval, and of the one of the equivalence test.

    All metrics must lie within the margin, so that they share no level for that
    (intersection-union).
    """
    return 1 - level / (candidates * len(VERDICT_METRICS)), 1 - 2 * level / candidates


def take_look(study: Study, blocks: int) -> list[Finding]:
    """Look once after `blocks` blocks, and keep what was seen: looks.json.

    A look that was taken stays as it is: a second one at the same data would be no other, and one
    at changed data would have no level left. So does what an earlier look has decided.
    """
    looks = read_looks(study.root)
    taken = next((entry for entry in looks if entry["blocks"] == blocks), None)
    if taken is not None:
        return taken["findings"]
    kept = {name: found for entry in looks for name, found in decided_in(entry).items()}
    findings = [kept.get(f.config, {}).get(f.metric, f) for f in look(study, blocks)]
    levels = study.config["statistics"]["looks"]
    looks.append({"blocks": blocks, "level": levels[blocks - FIRST_LOOK], "findings": findings})
    write_json(study.root / paths.LOOKS, msgspec.to_builtins(looks))
    return findings


def take_due_look(study: Study, block: int) -> list[Finding] | None:
    """Take the look that is due when a block of Phase A has ended; None where none is.

    Not while a launch up to it is missing or failed; nor where a later block has begun: what the
    look would have left out is measured then, and its level stays unspent.
    """
    blocks = block + 1
    if blocks < FIRST_LOOK or "looks" not in study.config["statistics"]:
        return None
    for launch in launches(study.document, "A"):
        index = read_index(launch.folder(study.root))
        ended = index is not None and index.status != "failed"
        if ended is not (launch.block < blocks):
            return None
    return take_look(study, blocks)
