"""Define the report's tables of effects.csv, by quantity, rate and metric."""

from collections.abc import Callable
from dataclasses import replace

from connector_tax import text
from connector_tax.artifacts import tables
from connector_tax.artifacts.metrics import ALL_METRICS, HEADLINE, VERDICT_METRICS, judged_metrics
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.tables import ALL_SIZES, KINDS, EffectRow, StepGroup
from connector_tax.artifacts.verdicts import JUDGED, in_words
from connector_tax.figures.resources import PANELS, decimals
from connector_tax.figures.tables import StudyTables
from connector_tax.figures.taxes import priors
from connector_tax.report.tables import (
    Column,
    Table,
    TableCell,
    TableRow,
    compact,
    interval,
    number,
    of_rows,
    percent,
    signed_size,
    table,
)

SHOWN_US = 1.0  # hooks below this mean per step are only in effects.csv

EffectColumn = Column[EffectRow]
# Name of a reference rate, the rate, and the table of its steps.
StepTable = tuple[str, float, Table]
METRIC: EffectColumn = ("Metric", lambda row: ALL_METRICS[row.metric].label)
TAX_COLUMNS: list[EffectColumn] = [
    ("Tax, %", lambda row: percent(row.estimate)),
    ("Interval of the verdict, %", lambda row: interval(*row.shown[1:])),
    ("At most, %", lambda row: percent(row.narrow_hi)),
]


def _configuration(study: StudyTables) -> EffectColumn:
    return ("Configuration", lambda row: study.label(row.config))


def _verdict(study: StudyTables) -> EffectColumn:
    """Return the column of verdicts, each with the mark of its tax."""

    def says(row: EffectRow) -> TableCell:
        is_aa = row.config == study.aa
        verdict_words = "A/A" if is_aa else in_words(row.verdict, row.margin)
        moved = row.verdict in JUDGED and row.margin is not None and not is_aa
        words = f"{verdict_words} ({study.labelled(row.mark)})" if row.mark else verdict_words
        return TableCell(words, verdict=row if moved else None)

    return ("Verdict", says)


def _aa(
    study: StudyTables, heading: str, says: Callable[[EffectRow | None], TableCell]
) -> EffectColumn:
    """Return a column about the A/A row of the same quantity, phase, cell and metric."""
    noise = {
        (row.quantity, row.phase, row.cell, row.metric): row
        for row in study.effects
        if row.config == study.aa
    }
    return (heading, lambda row: says(noise.get((row.quantity, row.phase, row.cell, row.metric))))


def at_references(study: StudyTables) -> list[tuple[str, Table]]:
    """Return titled tables of the taxes over all rates, then of p90 at both reference rates."""
    plain = study.against("plain")
    columns: list[EffectColumn] = [
        _configuration(study),
        ("UNIT", lambda row: number(row.own)),
        (f"{plain}, UNIT", lambda row: number(row.base)),
        *TAX_COLUMNS,
        (f"UNIT over {plain}", lambda row: number(row.difference[0])),
        ("p", lambda row: number(row.p_adjusted, 3)),
        ("By Huber", lambda row: TableCell("otherwise" if row.huber_differs else "")),
        _aa(study, "A/A, %", lambda aa: percent(_ends(aa)[0])),
        ("n", lambda row: number(row.n, 0)),
        (f"{plain}'s n", lambda row: number(row.n_base, 0)),
        ("Least n of a cell", lambda row: number(row.n_cell, 0)),
        ("Blocks", lambda row: number(row.n_blocks, 0)),
        ("Blocks to decide", lambda row: number(row.blocks_needed, 0)),
        ("By", lambda row: row.method),
        _verdict(study),
    ]
    sections = []
    judged = judged_metrics(study.settings["statistics"])
    metrics = dict.fromkeys((*judged, *VERDICT_METRICS, *HEADLINE))
    shown = [(ALL_RATES, metric) for metric in metrics]
    shown += [(reference, metric) for reference in REFERENCES for metric in HEADLINE]
    for reference, metric in shown:
        rows = list(study.at(reference, metric).values())
        if not rows:
            continue
        at, rate = "over all rates without saturation", rows[0].rate_rps
        if rate is not None:
            at = f"at {reference} ({rate:g} requests/s)"
        title = f"{ALL_METRICS[metric].label} {at}, {rows[0].family}"
        named = [(name.replace("UNIT", rows[0].unit), says) for name, says in columns]
        sections.append((title, of_rows(f"{metric}-{reference}", named, rows, first=1)))
    return sections


def amplification(study: StudyTables) -> Table | None:
    """Return tax at ref_load minus tax at ref_safe; None if the rates are equal."""
    rows = [row for row in study.of(tables.GAP) if row.metric in HEADLINE]
    if not any(row.status == "valid" for row in rows):
        return None
    columns: list[EffectColumn] = [
        _configuration(study),
        METRIC,
        ("At ref_safe, %", lambda row: percent(row.base)),
        ("At ref_load, %", lambda row: percent(row.own)),
        ("Gap, pp", lambda row: percent(row.estimate)),
        ("95 % interval, pp", lambda row: interval(row.lo, row.hi)),
        ("By", lambda row: row.method),
        ("Mark", lambda r: f"no verdict: {study.labelled(r.mark)}" if r.mark else ""),
    ]
    return of_rows("amplification", columns, rows, first=2)


def others(study: StudyTables) -> Table:
    """Return a table of every other tax: each rate, shape and metric."""
    columns: list[EffectColumn] = [
        _configuration(study),
        ("Phase", lambda row: row.phase),
        ("Cell", lambda row: row.cell),
        ("req/s", lambda row: compact(row.rate_rps)),
        METRIC,
        *TAX_COLUMNS,
        _aa(study, "A/A, %", lambda aa: percent(_ends(aa)[0])),
        ("Family", lambda row: row.family),
        ("n", lambda row: number(row.n, 0)),
        (study.against("plain's n"), lambda row: number(row.n_base, 0)),
        ("Least n of a cell", lambda row: number(row.n_cell, 0)),
        _verdict(study),
    ]
    rows = [
        row
        for row in study.of(tables.TAX)
        if not (row.phase == "A" and row.reference and row.metric in HEADLINE)
    ]
    return of_rows("other-taxes", columns, rows, first=3)


# ---- the prior


def prior(study: StudyTables) -> Table | None:
    """Return the TTFT p90 taxes of the prior (an earlier trace replay) and of this study; None
    without a match."""
    plain_s = study.settings["hypotheses"]["prior"]["plain_ttft_p90_s"]
    known, taxes = priors(study), study.at("ref_safe", HEADLINE[0])

    def expected(row: EffectRow) -> float:
        return known.get(row.config, 0.0)

    columns: list[EffectColumn] = [
        _configuration(study),
        ("Prior, s", lambda row: number(plain_s * (1 + expected(row)))),
        ("Prior tax, %", lambda row: percent(expected(row))),
        ("Measured, ms", lambda row: number(row.own)),
        ("Measured tax, %", lambda row: percent(row.estimate)),
        ("95 % interval, %", lambda row: interval(*row.shown[1:])),
        _verdict(study),
    ]
    base = [
        replace(row, config=study.baseline, own=row.base, estimate=None, lo=None, hi=None,
                family_lo=None, verdict="", mark="")
        for row in taxes.values()
        if row.base is not None
    ]  # fmt: skip
    rows = [taxes[item.id] for item in study.connectors if item.id in known and item.id in taxes]
    return of_rows("prior-table", columns, [*base[:1], *rows], first=3) if rows else None


# ---- engine steps


# Metric -> row of one configuration and group of steps; for HOOK by the hook's name.
StepCosts = dict[str, EffectRow]
# By item and configuration.
StepGroups = dict[tuple[str, str], StepCosts]


def _steps(study: StudyTables, quantity: str, reference: str) -> StepGroups:
    """Return the step rows of Phase A at a reference rate."""
    groups: StepGroups = {}
    for row in study.of(quantity, "A"):
        if row.reference == reference and row.item:
            groups.setdefault((row.item, row.config), {})[row.metric] = row
    return groups


def step_kinds(study: StudyTables) -> list[StepTable]:
    """Return step times above plain's at each reference rate, by kind and part."""
    order = [(StepGroup(kind).item, item.id) for kind in KINDS for item in study.compared]
    return [
        (reference, study.reference[reference],
         of_rows(f"steps-{reference}", _step_columns(study, reference),
                 [groups[key] for key in order if "step_us" in groups.get(key, {})]))
        for reference in REFERENCES
        if (groups := _steps(study, tables.STEP, reference))
    ]  # fmt: skip


def _step_columns(study: StudyTables, reference: str) -> list[Column[StepCosts]]:
    hooks = _steps(study, tables.HOOK, reference)

    def share(costs: StepCosts) -> float | None:
        row = costs["step_us"]
        return None if row.estimate is None or not row.base else row.estimate / row.base

    def dearest(costs: StepCosts) -> TableCell:
        step = costs["step_us"]
        # A child's hook is included in its parent's.
        parent_hooks = [row for row in hooks.get((step.item, step.config), {}).values()
               if "//" in row.metric and (row.estimate or 0) >= SHOWN_US]  # fmt: skip
        most = max(parent_hooks, key=lambda row: row.estimate or 0, default=None)
        if most is None:
            return TableCell(text.DASH)
        name = most.metric.rpartition("/")[2]
        return TableCell(f"{name} {_mean(most).text}", most.estimate)

    return [
        ("Configuration", lambda costs: study.label(costs["step_us"].config)),
        ("Steps", lambda costs: StepGroup.of(costs["step_us"].item).kind),
        (study.against("Step over plain's, µs"), lambda costs: _signed(costs["step_us"])),
        (study.against("% of plain's step"), lambda costs: percent(share(costs))),
        ("Hooks, µs", lambda costs: _mean(costs.get("hooks_us"))),
        ("Left, µs", lambda costs: _signed(costs.get("left_us"))),
        ("Dearest hook, µs", dearest),
        ("n", lambda costs: number(costs["step_us"].n, 0)),
    ]


def hooks(study: StudyTables) -> Table | None:
    """Return every configuration's hooks at ref_safe of at least SHOWN_US, by kind of step.

    A hook that does not run in a kind of step has no number there.
    """
    groups = _steps(study, tables.HOOK, "ref_safe")
    kinds = [kind for kind in KINDS if any(item == StepGroup(kind).item for item, _ in groups)]
    columns = ["Configuration", "Hook", "Of", "Process", *(f"{kind}, µs" for kind in kinds)]
    rows = []
    for item in study.configurations:
        of = [groups.get((StepGroup(kind).item, item.id), {}) for kind in kinds]
        names = dict.fromkeys(name for costs in of for name in costs)
        most = {
            name: max(costs[name].estimate or 0 for costs in of if name in costs) for name in names
        }
        dear = sorted((name for name in names if most[name] >= SHOWN_US), key=lambda n: -most[n])
        for name in dear:
            process, child, hook = name.split("/")
            words = [item.label, hook, child or "itself", process]
            rows.append(TableRow([*map(TableCell, words), *(_mean(c.get(name)) for c in of)]))
        if below := len(names) - len(dear):
            plural = f"{'other ' * bool(dear)}hook{'s' * (below > 1)}"
            words = [item.label, f"{below} {plural} below 1 µs per step"]
            dashes = [TableCell(text.DASH)] * (len(columns) - 2)
            rows.append(TableRow([*map(TableCell, words), *dashes], missing=True))
    return table("hooks", columns, rows) if rows else None


def _ends(row: EffectRow | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if row is None else (row.estimate, row.lo, row.hi)


def _signed(row: EffectRow | None) -> TableCell:
    return signed_size(*_ends(row))


def _mean(row: EffectRow | None) -> TableCell:
    """Return text such as `12.3 [10.1, 14.6]`, without brackets if there is no interval."""
    value, low, high = _ends(row)
    if value is None:
        return TableCell(text.DASH)

    def short(number: float) -> str:
        return text.number(number, 1) if abs(number) < 99.95 else f"{number:,.0f}"

    bounds = "" if low is None or high is None else f" [{short(low)}, {short(high)}]"
    return TableCell(short(value) + bounds, value)


# ---- resources


def resource_taxes(study: StudyTables) -> Table:
    """Return differences from plain: a row per configuration, a column per measured resource."""
    valid = [row for row in study.of(tables.RESOURCE) if row.status == "valid"]
    labels = [f"{study.label(study.baseline)} itself", *(c.label for c in study.connectors)]
    columns, rows = ["Configuration"], [[TableCell(label)] for label in labels]
    for name, heading in PANELS.items():
        by_config = {row.config: row for row in valid if row.metric == name}
        if not by_config:
            continue
        columns.append(heading)
        digits = decimals([r.difference[0] or 0.0 for c, r in by_config.items() if c != study.aa])
        base = next((row.base for row in by_config.values() if row.base is not None), None)
        words = text.DASH if base is None else text.signed(base, decimals([base]))
        rows[0].append(TableCell(words.removeprefix("+"), base))
        for line, item in zip(rows[1:], study.connectors, strict=True):
            line.append(_difference(by_config.get(item.id), digits))
    return table("resource-taxes", columns, [TableRow(cells) for cells in rows])


def _difference(row: EffectRow | None, digits: int) -> TableCell:
    ends = (None, None, None) if row is None else row.difference
    if ends[0] is None:
        return TableCell(text.DASH)
    value, *bounds = (text.signed(end, digits) for end in ends if end is not None)
    return TableCell(f"{value} [{', '.join(bounds)}]" if bounds else value, ends[0])


def every_resource(study: StudyTables) -> Table:
    """Return a table with every recorded number of every resource."""

    def taxed(row: EffectRow, value: float | None) -> float | None:
        return value if row.scale == tables.LOG else None

    columns: list[EffectColumn] = [
        _configuration(study),
        ("Resource", lambda row: row.metric),
        ("Unit", lambda row: row.unit),
        (study.against("plain"), lambda row: compact(row.base)),
        ("Mean", lambda row: compact(row.own)),
        ("Difference", lambda row: compact(row.difference[0])),
        ("from", lambda row: compact(row.difference[1])),
        ("to", lambda row: compact(row.difference[2])),
        ("Tax, %", lambda row: percent(taxed(row, row.estimate))),
        ("95 % interval, %", lambda row: interval(taxed(row, row.lo), taxed(row, row.hi))),
        ("p", lambda row: number(row.p, 3)),
        _aa(study, "A/A difference", lambda aa: compact(None if aa is None else aa.difference[0])),
        ("Companions, threads", lambda row: row.item),
        ("Blocks", lambda row: number(row.n_blocks, 0)),
        ("By", lambda row: row.method),
    ]
    rows = [row for row in study.of(tables.RESOURCE) if row.config != study.aa]
    return of_rows("all-resources", columns, rows, first=3)


def resources_missing(study: StudyTables) -> str | None:
    """Return why no resource was recorded, or None if any was."""
    rows = study.of(tables.RESOURCE)
    if any(row.status == "valid" for row in rows):
        return None
    return next((row.reason for row in rows if row.reason), "no launch was measured")


# ---- an emulated device


def device_steps(study: StudyTables) -> list[StepTable]:
    """Return an emulated device's steps at each reference rate, in total and by batch size."""

    def of_one_size(key: tuple[str, str]) -> bool:
        return StepGroup.of(key[0]).batch != ALL_SIZES

    return [
        (reference, study.reference[reference],
         of_rows(f"device-{reference}", _device_columns(study, reference),
                 [groups[key] for key in sorted(groups, key=of_one_size)]))
        for reference in REFERENCES
        if (groups := _steps(study, tables.DEVICE, reference))
    ]  # fmt: skip


def _device_columns(study: StudyTables, reference: str) -> list[Column[StepCosts]]:
    tpot = study.at(reference, "tpot_p50")

    def of(steps: StepCosts) -> StepGroup:
        return StepGroup.of(steps["device_us"].item)

    def tpot_us(steps: StepCosts) -> TableCell:
        """Return the median TPOT's difference from plain, as a check of the exposed time."""
        row = tpot.get(steps["device_us"].config)
        if row is None or (of(steps).kind, of(steps).batch) != ("decode", ALL_SIZES):
            return TableCell(text.DASH)
        return signed_size(*(None if ms is None else 1e3 * ms for ms in row.difference))

    def exposed_share(steps: StepCosts) -> TableCell:
        share = _ends(steps.get("exposed_share"))[0]
        return number(None if share is None else 100 * share, 1)

    return [
        ("Configuration", lambda steps: study.label(steps["device_us"].config)),
        ("Steps", lambda steps: of(steps).kind),
        ("Sequences", lambda steps: of(steps).batch),
        ("Device, µs", lambda steps: number(steps["device_us"].estimate, 0)),
        ("Period, µs", lambda steps: _mean(steps.get("period_us"))),
        ("Exposed, µs", lambda steps: _mean(steps.get("exposed_us"))),
        ("Exposed steps, %", exposed_share),
        ("Host busy, µs", lambda steps: _mean(steps.get("host_busy_us"))),
        (
            study.against("Exposed over plain, µs"),
            lambda steps: _signed(steps.get("over_plain_us")),
        ),
        (study.against("TPOT over plain (A/B), µs"), tpot_us),
    ]


# ---- the engines' settings


def also_differs(study: StudyTables) -> dict[str, str]:
    """Return the settings that differ from plain's as text, by configuration."""
    return {row.config: row.also_differs for row in study.engine if row.also_differs}


def same_everywhere(study: StudyTables) -> list[tables.EngineRow]:
    """Return plain's settings that are the same in all configurations whose settings are known."""
    other = {row.setting for row in study.engine if row.differs}
    unknown = {row.setting for row in study.engine if row.setting and not row.value}
    return [
        row
        for row in study.engine
        if row.config == study.baseline and row.value and row.setting not in other | unknown
    ]


def settings(study: StudyTables) -> Table:
    """Return every setting of every configuration's running engine."""
    columns: list[Column[tables.EngineRow]] = [
        ("Configuration", lambda row: study.label(row.config)),
        ("Setting", lambda row: row.setting or text.DASH),
        ("Value", lambda row: row.value or text.DASH),
        (study.against("plain"), lambda row: row.plain or text.DASH),
        ("Differs", lambda row: text.compact(row.differs)),
        ("Read from", lambda row: row.source or text.DASH),
        ("Remark", lambda row: row.reason),
    ]
    return of_rows("settings", columns, study.engine)
