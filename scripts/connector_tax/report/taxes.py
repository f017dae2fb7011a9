"""The tables of taxes: at the reference rates, where the cost sits, what queueing adds, others."""

from collections.abc import Sequence
from dataclasses import dataclass

from connector_tax import text
from connector_tax.artifacts.names import MARKED, POINT_ESTIMATE, REFERENCES
from connector_tax.artifacts.tables import AmplificationRow, TaxRow
from connector_tax.figures.tables import StudyTables
from connector_tax.report.tables import Table, TableCell, TableRow, lost, table

METRICS = {
    "ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90", "ttft_p50": "TTFT p50",
    "tpot_p50": "TPOT p50", "e2e_p90": "E2E p90",
}  # fmt: skip
HEADLINE = ("ttft_p90", "tpot_p90")
VERDICTS = {POINT_ESTIMATE: "no verdict", MARKED: "no verdict"}


@dataclass(frozen=True)
class TaxSection:
    """The taxes of one metric at one reference rate."""

    title: str
    rows: Sequence[TaxRow]
    table: Table


def at_references(study: StudyTables) -> list[TaxSection]:
    """TTFT and TPOT p90 at both reference rates; ref_load only where it is another rate."""
    tables = []
    for reference in REFERENCES:
        for metric in HEADLINE:
            rows = list(study.taxes_at(reference, metric).values())
            rate = study.reference[reference]
            if rows and rate is not None:
                title = f"{METRICS[metric]} at {reference} ({rate:g} requests/s), {rows[0].family}"
                own = _headline_table(study, f"{metric}-{reference}", rows)
                tables.append(TaxSection(title, rows, own))
    return tables


def _headline_table(study: StudyTables, name: str, rows: Sequence[TaxRow]) -> Table:
    plain = study.against("plain")
    columns = (
        "Configuration", "ms", f"{plain}, ms", "Tax, %", "95 % interval, %", "All requests, %",
        f"ms over {plain}", "p", "A/A, %", "n", f"{plain}'s n", "Blocks", "Blocks to decide", "By",
        "Verdict",
    )  # fmt: skip
    return table(name, columns, [_headline_row(study, columns, row) for row in rows])


def _headline_row(study: StudyTables, columns: Sequence[str], row: TaxRow) -> TableRow:
    name = study.label(row.config)
    if row.status != "valid":
        return lost(columns, [name], f"{row.status}: {row.reason}")
    return TableRow(
        [
            TableCell(name),
            number(row.config_ms),
            number(row.plain_ms),
            percent(row.tax),
            interval(row.tax_lo, row.tax_hi),
            percent(row.tax_all),
            number(row.abs_ms),
            number(row.p_adjusted, 3),
            percent(row.aa_tax),
            number(row.n_config, 0),
            number(row.n_plain, 0),
            number(row.n_blocks, 0),
            number(row.blocks_needed, 0),
            TableCell(row.interval_method),
            TableCell(judged(study, row)),
        ]
    )


def by_device(study: StudyTables) -> Table | None:
    """TTFT and TPOT p90 at ref_safe on each device, A/A too; None on one device."""
    cell = study.cell_at("ref_safe")
    shown = [row for row in study.device_taxes if (row.phase, row.cell) == ("A", cell)]
    if not shown:
        return None
    devices = list(dict.fromkeys(row.device for row in shown))
    columns = ("Configuration", "Metric", *devices, "p of one tax", "Verdict")
    rows = []
    for metric in HEADLINE:
        for config, tax in study.taxes_at("ref_safe", metric).items():
            own = [row for row in shown if (row.config, row.metric) == (config, metric)]
            cells = [TableCell(text.tax(row.tax, row.tax_lo, row.tax_hi), row.tax) for row in own]
            first = [TableCell(study.label(config)), TableCell(METRICS[metric])]
            rows.append(
                TableRow([*first, *cells, number(own[0].same_p, 3), TableCell(judged(study, tax))])
            )
    return table("by-device", columns, rows)


def where_the_cost_sits(study: StudyTables) -> Table | None:
    """The step taxes and capacity of each configuration at ref_safe; None without any."""
    rows = [
        row for row in study.taxes_at("ref_safe", "ttft_p90").values() if row.config != study.aa
    ]
    columns = (
        "Configuration", "schedule(), µs", "callbacks, µs", "rest of schedule(), µs",
        "whole engine step, µs", study.against("capacity over plain's"),
    )  # fmt: skip
    known = [row for row in rows if row.status == "valid"]
    if not any(row.step_tax_us is not None for row in known):
        return None
    cells = [
        TableRow(
            [
                TableCell(study.label(row.config)),
                *(
                    TableCell(text.DASH if us is None else text.signed(us, 0), us)
                    for us in (
                        row.step_tax_us, row.callback_us, row.unattributed_us,
                        row.engine_step_tax_us,
                    )
                ),
                number(row.capacity_ratio),
            ]
        )
        for row in known
    ]  # fmt: skip
    return table("cost", columns, cells)


def amplification(study: StudyTables) -> Table | None:
    """Tax at ref_load minus tax at ref_safe; None where they are one rate."""
    rows = [row for row in study.amplification if row.metric in HEADLINE]
    if not any(row.status == "valid" for row in rows):
        return None
    columns = (
        "Configuration", "Metric", "At ref_safe, %", "At ref_load, %", "Gap, pp",
        "95 % interval, pp", "By", "Mark",
    )  # fmt: skip
    return table("amplification", columns, [_gap_row(study, columns, row) for row in rows])


def _gap_row(study: StudyTables, columns: Sequence[str], row: AmplificationRow) -> TableRow:
    first = [study.label(row.config), METRICS[row.metric]]
    if row.status != "valid":
        return lost(columns, first, f"{row.status}: {row.reason}")
    return TableRow(
        [
            *map(TableCell, first),
            percent(row.tax_ref_safe),
            percent(row.tax_ref_load),
            percent(row.gap),
            interval(row.gap_lo, row.gap_hi),
            TableCell(row.interval_method),
            TableCell(f"no verdict: {study.labelled(row.mark)}" if row.mark else ""),
        ]
    )


def others(study: StudyTables) -> Table:
    """Every other tax: each rate, shape and metric."""
    columns = (
        "Configuration", "Phase", "Cell", "req/s", "Metric", "Tax, %", "95 % interval, %",
        "A/A, %", "Family", "n", study.against("plain's n"), "Verdict",
    )  # fmt: skip
    rows = []
    for row in study.taxes:
        if row.phase == "A" and row.reference and row.metric in HEADLINE:
            continue
        first = [study.label(row.config), row.phase, row.cell]
        if row.status != "valid":
            rows.append(lost(columns, first, f"{row.status}: {row.reason}"))
            continue
        rows.append(
            TableRow(
                [
                    *map(TableCell, first),
                    TableCell(text.compact(row.rate_rps), row.rate_rps),
                    TableCell(METRICS[row.metric]),
                    percent(row.tax),
                    interval(row.tax_lo, row.tax_hi),
                    percent(row.aa_tax),
                    TableCell(row.family),
                    number(row.n_config, 0),
                    number(row.n_plain, 0),
                    TableCell(judged(study, row)),
                ]
            )
        )
    return table("other-taxes", columns, rows)


def resolution(study: StudyTables) -> Table:
    """What a cell of n requests can resolve."""
    rows = [
        TableRow(
            [
                TableCell(row["source"]),
                TableCell(row["metric"].upper()),
                TableCell(row["where"]),
                number(row["sigma"], 3),
                number(row["n"], 0),
                TableCell(f"±{100 * row['half_width']:.1f}", row["half_width"]),
            ]
        )
        for row in study.hypotheses["resolution"]
    ]
    return table("resolution", ("Source", "Metric", "Where", "σ", "n", "Half-width, %"), rows)


def judged(study: StudyTables, row: TaxRow) -> str:
    """The verdict in words, with the mark."""
    verdict = "A/A" if row.config == study.aa else VERDICTS.get(row.verdict, row.verdict)
    return f"{verdict} ({study.labelled(row.mark)})" if row.mark else verdict


def percent(value: float | None) -> TableCell:
    """A share as a cell, in per cent."""
    return TableCell(text.DASH if value is None else text.signed(100 * value, 1), value)


def number(value: float | None, decimals: int = 2) -> TableCell:
    """A plain number as a cell."""
    return TableCell(text.number(value, decimals), value)


def interval(low: float | None, high: float | None) -> TableCell:
    """An interval as a cell, sorted by its lower end."""
    return TableCell(text.interval(low, high), low)
