"""What the report says of effects.csv: columns over its rows, by quantity, rate and metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from connector_tax import text
from connector_tax.artifacts import tables
from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.tables import DeviceGroup, EffectRow
from connector_tax.artifacts.verdicts import in_words
from connector_tax.figures.fig10_resources import PANELS, decimals
from connector_tax.figures.tables import StudyTables
from connector_tax.report.tables import (
    Column,
    Table,
    TableCell,
    TableRow,
    compact,
    interval,
    mean,
    number,
    of_rows,
    percent,
    signed_size,
    table,
)

SHOWN_US = 1.0  # hooks below this mean per step are in effects.csv alone
STEPS = {
    "step": "schedule()",
    "callbacks": "callbacks",
    "engine_step": "whole engine step",
}
ALL = "all"

EffectColumn = Column[EffectRow]


@dataclass(frozen=True)
class Section:
    """A table of one metric, or of steps, at one reference rate."""

    title: str
    reference: str
    rate_rps: float | None
    rows: Sequence[EffectRow]
    table: Table


def judged(study: StudyTables, row: EffectRow) -> str:
    """The verdict in words, with the mark."""
    verdict = "A/A" if row.config == study.aa else in_words(row.verdict, row.margin)
    return f"{verdict} ({study.labelled(row.mark)})" if row.mark else verdict


def _configuration(study: StudyTables) -> EffectColumn:
    return Column("Configuration", lambda row: study.label(row.config))


def _metric() -> EffectColumn:
    return Column("Metric", lambda row: LATENCY_METRICS[row.metric].label)


def _tax() -> list[EffectColumn]:
    return [
        Column("Tax, %", lambda row: percent(row.estimate)),
        Column("95 % interval, %", lambda row: interval(row.lo, row.hi)),
        Column("At most, %", lambda row: percent(row.narrow_hi)),
    ]


def _verdict(study: StudyTables) -> EffectColumn:
    return Column("Verdict", lambda row: judged(study, row))


def _noise(study: StudyTables, quantity: str) -> dict[tuple[str, str, str], EffectRow]:
    """The A/A rows of a quantity by phase, cell and metric."""
    return {
        (row.phase, row.cell, row.metric): row
        for row in study.of(quantity)
        if row.config == study.aa
    }


def _aa(study: StudyTables, quantity: str) -> EffectColumn:
    noise = _noise(study, quantity)

    def says(row: EffectRow) -> TableCell:
        aa = noise.get((row.phase, row.cell, row.metric))
        return percent(None if aa is None else aa.estimate)

    return Column("A/A, %", says)


def at_references(study: StudyTables) -> list[Section]:
    """The taxes over all rates, then p90 at both reference rates (ref_load where it is another)."""
    plain = study.against("plain")
    columns: list[EffectColumn] = [
        _configuration(study),
        Column("ms", lambda row: number(row.own)),
        Column(f"{plain}, ms", lambda row: number(row.base)),
        *_tax(),
        Column(f"ms over {plain}", lambda row: number(row.difference[0])),
        Column("p", lambda row: number(row.p_adjusted, 3)),
        _aa(study, tables.TAX),
        Column("n", lambda row: number(row.n, 0)),
        Column(f"{plain}'s n", lambda row: number(row.n_base, 0)),
        Column("Blocks", lambda row: number(row.n_blocks, 0)),
        Column("Blocks to decide", lambda row: number(row.blocks_needed, 0)),
        Column("By", lambda row: row.method),
        _verdict(study),
    ]
    sections = []
    shown = [(ALL_RATES, metric) for metric in (*VERDICT_METRICS, *HEADLINE)]
    shown += [(reference, metric) for reference in REFERENCES for metric in HEADLINE]
    for reference, metric in shown:
        rows = list(study.at(reference, metric).values())
        if not rows:
            continue
        at, rate = "over all rates without saturation", rows[0].rate_rps
        if rate is not None:
            at = f"at {reference} ({rate:g} requests/s)"
        title = f"{LATENCY_METRICS[metric].label} {at}, {rows[0].family}"
        own = of_rows(f"{metric}-{reference}", columns, rows, first=1)
        sections.append(Section(title, reference, rate, rows, own))
    return sections


def where_the_cost_sits(study: StudyTables) -> Table | None:
    """The step taxes and capacity of each configuration at ref_safe; None without any."""
    steps = {metric: study.at("ref_safe", metric, tables.STEP) for metric in STEPS}
    taxes = study.at("ref_safe", HEADLINE[0]).values()
    rows = [row for row in taxes if row.status == "valid" and row.config != study.aa]
    knees = study.reference["saturation_rate_rps"]
    plain = knees.get(study.baseline)

    def us(config: str, metric: str) -> float | None:
        row = steps[metric].get(config)
        return None if row is None else row.estimate

    def signed(value: float | None) -> TableCell:
        return TableCell(text.DASH if value is None else text.signed(value, 0), value)

    def capacity(row: EffectRow) -> TableCell:
        own = knees.get(row.config)
        return number(None if own is None or plain is None else own / plain)

    def rest(row: EffectRow) -> TableCell:
        step, callbacks = us(row.config, "step"), us(row.config, "callbacks")
        return signed(None if step is None or callbacks is None else step - callbacks)

    if not any(us(row.config, "step") is not None for row in rows):
        return None
    columns: list[EffectColumn] = [
        _configuration(study),
        Column("schedule(), µs", lambda row: signed(us(row.config, "step"))),
        Column("callbacks, µs", lambda row: signed(us(row.config, "callbacks"))),
        Column("rest of schedule(), µs", rest),
        Column("whole engine step, µs", lambda row: signed(us(row.config, "engine_step"))),
        Column(study.against("capacity over plain's"), capacity),
    ]
    return of_rows("cost", columns, rows)


def amplification(study: StudyTables) -> Table | None:
    """Tax at ref_load minus tax at ref_safe; None where they are one rate."""
    rows = [row for row in study.of(tables.GAP) if row.metric in HEADLINE]
    if not any(row.status == "valid" for row in rows):
        return None
    columns: list[EffectColumn] = [
        _configuration(study),
        _metric(),
        Column("At ref_safe, %", lambda row: percent(row.base)),
        Column("At ref_load, %", lambda row: percent(row.own)),
        Column("Gap, pp", lambda row: percent(row.estimate)),
        Column("95 % interval, pp", lambda row: interval(row.lo, row.hi)),
        Column("By", lambda row: row.method),
        Column("Mark", lambda r: f"no verdict: {study.labelled(r.mark)}" if r.mark else ""),
    ]
    return of_rows("amplification", columns, rows, first=2)


def others(study: StudyTables) -> Table:
    """Every other tax: each rate, shape and metric."""
    columns: list[EffectColumn] = [
        _configuration(study),
        Column("Phase", lambda row: row.phase),
        Column("Cell", lambda row: row.cell),
        Column("req/s", lambda row: compact(row.rate_rps)),
        _metric(),
        *_tax(),
        _aa(study, tables.TAX),
        Column("Family", lambda row: row.family),
        Column("n", lambda row: number(row.n, 0)),
        Column(study.against("plain's n"), lambda row: number(row.n_base, 0)),
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
    """TTFT p90 of the earlier trace replay beside this study's; None with nothing to compare."""
    given, taxes = study.settings["hypotheses"]["prior"], study.at("ref_safe", HEADLINE[0])
    plain_s = given["plain_ttft_p90_s"]
    known = {
        "nixl_both": given["nixl_ttft_p90_s"],
        "mooncake_both": given["mooncake_both_ttft_p90_s"],
    }
    if not any(item.id in known for item in study.connectors):
        return None
    plain_ms = next((row.base for row in taxes.values() if row.base is not None), None)
    dash = TableCell(text.DASH)
    first = [TableCell(study.label(study.baseline)), number(plain_s), dash, number(plain_ms), dash]
    rows = [TableRow([*first, dash, TableCell("")])]
    columns: list[EffectColumn] = [
        _configuration(study),
        Column("Prior, s", lambda row: number(known[row.config])),
        Column("Prior tax, %", lambda row: percent(known[row.config] / plain_s - 1)),
        Column("Measured, ms", lambda row: number(row.own)),
        Column("Measured tax, %", lambda row: percent(row.estimate)),
        Column("95 % interval, %", lambda row: interval(row.lo, row.hi)),
        _verdict(study),
    ]
    for item in study.connectors:
        if item.id in known:
            row = taxes.get(item.id)
            rows.append(_prior_row(study, columns, item.id, row, known[item.id] / plain_s - 1))
    return table("prior-table", [column.heading for column in columns], rows)


def _prior_row(
    study: StudyTables, columns: Sequence[EffectColumn], config: str, row: EffectRow | None,
    prior_tax: float,
) -> TableRow:  # fmt: skip
    if row is not None and row.status == "valid":
        return TableRow([column.cell(row) for column in columns])
    reason = "not measured at ref_safe" if row is None else f"{row.status}: {row.reason}"
    dashes = [TableCell(text.DASH)] * (len(columns) - 3)
    cells = [TableCell(study.label(config)), percent(prior_tax), *dashes, TableCell(reason)]
    return TableRow(cells, lost=True)


# ---- engine steps


def step_taxes(study: StudyTables) -> list[Section]:
    """Step taxes at both reference rates; ref_load only where it is another rate."""
    sections = []
    for reference in REFERENCES:
        by_metric = {metric: study.at(reference, metric, tables.STEP) for metric in STEPS}
        rate = study.reference[reference]
        if rate is None or not any(by_metric.values()):
            continue
        named = [(item.id, item.label) for item in study.connectors]
        named.append((study.aa or "", study.against("plain over plain (A/A)")))
        rows = [
            TableRow([TableCell(label), *(_step(of.get(config), config == study.aa)
                                          for of in by_metric.values())])
            for config, label in named
        ]  # fmt: skip
        own = table(f"steps-{reference}", ("Configuration", *STEPS.values()), rows)
        sections.append(Section("", reference, rate, [], own))
    return sections


def _step(row: EffectRow | None, noise: bool) -> TableCell:
    if row is not None and row.estimate is not None:
        return signed_size((row.estimate, row.lo, row.hi))
    return TableCell(text.DASH if row is None or noise else row.reason)


def hooks(study: StudyTables) -> Table | None:
    """Every configuration's hooks at ref_safe that take SHOWN_US of a step or more."""
    of: dict[str, dict[str, dict[str, EffectRow]]] = {}
    for row in study.of(tables.HOOK, "A"):
        if row.reference == "ref_safe":
            of.setdefault(row.config, {}).setdefault(row.item, {})[row.metric] = row
    columns: list[Column[Mapping[str, EffectRow]]] = [
        Column("Configuration", lambda hook: study.label(hook["mean"].config)),
        Column("Hook", lambda hook: hook["mean"].item.split("/")[2]),
        Column("Of", lambda hook: hook["mean"].item.split("/")[1] or "itself"),
        Column("Process", lambda hook: hook["mean"].item.split("/")[0]),
        Column("Median, µs", lambda hook: _mean(hook.get("p50"))),
        Column("Mean, µs", lambda hook: _mean(hook["mean"])),
        Column("Share, %", lambda hook: number(_share(hook.get("share")))),
        Column("Ran in", _ran),
        Column("In empty steps, µs", lambda hook: number(hook["empty"].estimate, 1)),
    ]
    rows = []
    for item in study.connectors:
        own = sorted(of.get(item.id, {}).values(), key=lambda hook: -(hook["mean"].estimate or 0))
        dear = [hook for hook in own if (hook["mean"].estimate or 0) >= SHOWN_US]
        rows += [TableRow([column.cell(hook) for column in columns]) for hook in dear]
        if below := len(own) - len(dear):
            words = f"{below} {'other ' * bool(dear)}hook{'s' * (below > 1)} below 1 µs per step"
            dashes = [TableCell(text.DASH)] * (len(columns) - 2)
            rows.append(TableRow([TableCell(item.label), TableCell(words), *dashes], lost=True))
    return table("hooks", [column.heading for column in columns], rows) if rows else None


def _mean(row: EffectRow | None) -> TableCell:
    return mean((None, None, None) if row is None else (row.estimate, row.lo, row.hi))


def _share(row: EffectRow | None) -> float | None:
    return None if row is None or row.estimate is None else 100 * row.estimate


def _ran(hook: Mapping[str, EffectRow]) -> TableCell:
    ran, steps = hook["p50"].n if "p50" in hook else 0, hook["mean"].n
    return TableCell(f"{ran or 0} of {steps}", (ran or 0) / (steps or 1))


# ---- resources


def resource_taxes(study: StudyTables) -> Table:
    """Differences from plain: a row for each configuration, a column for each resource read."""
    valid = {(r.config, r.metric): r for r in study.of(tables.RESOURCE) if r.status == "valid"}
    columns, rows = ["Configuration"], [[TableCell(f"{study.label(study.baseline)} itself")]]
    rows += [[TableCell(item.label)] for item in study.connectors]
    for name, heading in PANELS.items():
        own = {config: row for (config, metric), row in valid.items() if metric == name}
        if not own:
            continue
        columns.append(heading)
        digits = decimals([r.difference[0] or 0.0 for c, r in own.items() if c != study.aa])
        base = next((row.base for row in own.values() if row.base is not None), None)
        words = text.DASH if base is None else text.signed(base, decimals([base]))
        rows[0].append(TableCell(words.removeprefix("+"), base))
        for line, item in zip(rows[1:], study.connectors, strict=True):
            line.append(_difference(own.get(item.id), digits))
    return table("resource-taxes", columns, [TableRow(cells) for cells in rows])


def _difference(row: EffectRow | None, digits: int) -> TableCell:
    ends = (None, None, None) if row is None else row.difference
    if ends[0] is None:
        return TableCell(text.DASH)
    value, *bounds = (None if end is None else text.signed(end, digits) for end in ends)
    known = [bound for bound in bounds if bound is not None]
    return TableCell(f"{value} [{', '.join(known)}]" if known else str(value), ends[0])


def every_resource(study: StudyTables) -> Table:
    """All numbers of every resource."""
    noise = _noise(study, tables.RESOURCE)

    def tax(row: EffectRow, value: float | None) -> float | None:
        return value if row.scale == tables.LOG else None

    def aa(row: EffectRow) -> TableCell:
        own = noise.get((row.phase, row.cell, row.metric))
        return compact(None if own is None else own.difference[0])

    columns: list[EffectColumn] = [
        _configuration(study),
        Column("Resource", lambda row: row.metric),
        Column("Unit", lambda row: row.unit),
        Column(study.against("plain"), lambda row: compact(row.base)),
        Column("Mean", lambda row: compact(row.own)),
        Column("Difference", lambda row: compact(row.difference[0])),
        Column("from", lambda row: compact(row.difference[1])),
        Column("to", lambda row: compact(row.difference[2])),
        Column("Tax, %", lambda row: percent(tax(row, row.estimate))),
        Column("95 % interval, %", lambda row: interval(tax(row, row.lo), tax(row, row.hi))),
        Column("p", lambda row: number(row.p, 3)),
        Column("A/A difference", aa),
        Column("Companions", lambda row: row.item),
        Column("Blocks", lambda row: number(row.n_blocks, 0)),
        Column("By", lambda row: row.method),
    ]
    rows = [row for row in study.of(tables.RESOURCE) if row.config != study.aa]
    return of_rows("all-resources", columns, rows, first=3)


def resources_missing(study: StudyTables) -> str | None:
    """Why no resource was recorded at all; None where some were."""
    rows = study.of(tables.RESOURCE)
    if any(row.status == "valid" for row in rows):
        return None
    return next((row.reason for row in rows if row.reason), "no launch was measured")


# ---- an emulated device


def device_steps(study: StudyTables) -> list[Section]:
    """The steps of an emulated device at each reference rate: rows by kind and size of batch."""
    sections: list[Section] = []
    for reference in REFERENCES:
        rate, groups = study.reference[reference], dict[tuple[str, str], dict[str, EffectRow]]()
        for row in study.of(tables.DEVICE, "A"):
            if row.reference == reference:
                groups.setdefault((row.item, row.config), {})[row.metric] = row
        if not groups or rate is None:
            continue
        # All sizes together first.
        order = sorted(groups, key=lambda key: DeviceGroup.of(key[0]).batch != ALL)
        columns = _device_columns(study, reference)
        own = of_rows(f"device-{reference}", columns, [groups[key] for key in order])
        sections.append(Section("", reference, rate, [], own))
    return sections


def _device_columns(study: StudyTables, reference: str) -> list[Column[Mapping[str, EffectRow]]]:
    tpot = study.at(reference, "tpot_p50")

    def of(steps: Mapping[str, EffectRow]) -> DeviceGroup:
        return DeviceGroup.of(steps["device_us"].item)

    def over_plain(steps: Mapping[str, EffectRow]) -> TableCell:
        row = steps.get("over_plain_us")
        return signed_size((None,) if row is None else (row.estimate, row.lo, row.hi))

    def tpot_us(steps: Mapping[str, EffectRow]) -> TableCell:
        """The median TPOT's difference from plain: what the exposed time must agree with."""
        row = tpot.get(steps["device_us"].config)
        if row is None or (of(steps).kind, of(steps).batch) != ("decode", ALL):
            return TableCell(text.DASH)
        return signed_size([None if ms is None else 1e3 * ms for ms in row.difference])

    return [
        Column("Configuration", lambda steps: study.label(steps["device_us"].config)),
        Column("Steps", lambda steps: of(steps).kind),
        Column("Sequences", lambda steps: of(steps).batch),
        Column("Device, µs", lambda steps: number(steps["device_us"].estimate, 0)),
        Column("Period, µs", lambda steps: _mean(steps.get("period_us"))),
        Column("Exposed, µs", lambda steps: _mean(steps.get("exposed_us"))),
        Column("Exposed steps, %", lambda steps: number(_share(steps.get("exposed_share")), 1)),
        Column("Host busy, µs", lambda steps: _mean(steps.get("host_busy_us"))),
        Column(study.against("Exposed over plain, µs"), over_plain),
        Column(study.against("TPOT over plain (A/B), µs"), tpot_us),
    ]


# ---- the engines' settings


def also_differs(study: StudyTables) -> dict[str, str]:
    """Configuration to the settings in which its engine is not as plain's, in words."""
    return {row.config: row.also_differs for row in study.engine if row.also_differs}


def same_everywhere(study: StudyTables) -> list[tables.EngineRow]:
    """Plain's known settings that every configuration with settings has too."""
    other = {row.setting for row in study.engine if row.differs}
    unknown = {row.setting for row in study.engine if row.setting and not row.value}
    return [
        row
        for row in study.engine
        if row.config == study.baseline and row.value and row.setting not in other | unknown
    ]


def settings(study: StudyTables) -> Table:
    """Every setting of every configuration's running engine."""
    columns: list[Column[tables.EngineRow]] = [
        Column("Configuration", lambda row: study.label(row.config)),
        Column("Setting", lambda row: row.setting or text.DASH),
        Column("Value", lambda row: row.value or text.DASH),
        Column(study.against("plain"), lambda row: row.plain or text.DASH),
        Column("Differs", lambda row: text.compact(row.differs)),
        Column("Read from", lambda row: row.source or text.DASH),
        Column("Remark", lambda row: row.reason),
    ]
    return of_rows("settings", columns, study.engine)
