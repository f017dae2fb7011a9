"""What the report says of resources, and of what else differs between plain and a configuration."""

from connector_tax import text
from connector_tax.artifacts.tables import EngineRow, ResourceRow
from connector_tax.figures.fig10_resources import PANELS, decimals
from connector_tax.figures.tables import StudyTables
from connector_tax.report.tables import Table, TableCell, TableRow, lost, table
from connector_tax.report.taxes import interval, number, percent


def overview(study: StudyTables) -> Table:
    """Differences from plain: a row for each configuration, a column for each resource read."""
    valid = {(r.config, r.resource): r for r in study.resources if r.status == "valid"}
    shown = [name for name in PANELS if any(resource == name for _, resource in valid)]
    digits = {
        name: decimals([r.difference or 0.0 for (_, n), r in valid.items() if n == name])
        for name in shown
    }
    plain = []
    for name in shown:
        values = [r.plain_mean for (_, n), r in valid.items() if n == name]
        value = next((v for v in values if v is not None), None)
        words = text.DASH if value is None else text.signed(value, decimals([value]))
        plain.append(TableCell(words.removeprefix("+"), value))
    rows = [TableRow([TableCell(f"{study.label(study.baseline)} itself"), *plain])]
    for item in study.connectors:
        cells = [_difference(valid.get((item.id, name)), digits[name]) for name in shown]
        rows.append(TableRow([TableCell(item.label), *cells]))
    return table("resource-taxes", ("Configuration", *(PANELS[name] for name in shown)), rows)


def _difference(row: ResourceRow | None, digits: int) -> TableCell:
    if row is None or row.difference is None:
        return TableCell(text.DASH)
    said = text.signed(row.difference, digits)
    if row.difference_lo is not None and row.difference_hi is not None:
        ends = (text.signed(end, digits) for end in (row.difference_lo, row.difference_hi))
        said = f"{said} [{', '.join(ends)}]"
    return TableCell(said, row.difference)


def everything(study: StudyTables) -> Table:
    """All numbers of every resource."""
    columns = (
        "Configuration", "Resource", "Unit", study.against("plain"), "Mean", "Difference", "from",
        "to", "Tax, %", "95 % interval, %", "p", "A/A difference", "Companions", "Blocks", "By",
    )  # fmt: skip
    rows = []
    for row in study.resources:
        first = [study.label(row.config), row.resource, row.unit]
        if row.status != "valid":
            rows.append(lost(columns, first, f"{row.status}: {row.reason}"))
            continue
        numbers = (
            row.plain_mean, row.config_mean, row.difference, row.difference_lo, row.difference_hi,
        )  # fmt: skip
        cells = [
            *map(TableCell, first),
            *(TableCell(text.compact(value), value) for value in numbers),
            percent(row.tax),
            interval(row.tax_lo, row.tax_hi),
            number(row.p_value, 3),
            TableCell(text.compact(row.aa_difference), row.aa_difference),
            TableCell(row.companions),
            number(row.n_blocks, 0),
            TableCell(row.interval_method),
        ]
        rows.append(TableRow(cells))
    return table("all-resources", columns, rows)


def not_recorded(study: StudyTables) -> str | None:
    """Why no resource was recorded at all; None where some were."""
    if any(row.status == "valid" for row in study.resources):
        return None
    return next((row.reason for row in study.resources if row.reason), "no launch was measured")


def also_differs(study: StudyTables) -> dict[str, str]:
    """Configuration to the settings in which its engine is not as plain's, in words."""
    return {row.config: row.also_differs for row in study.engine if row.also_differs}


def same_everywhere(study: StudyTables) -> list[EngineRow]:
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
    plain = study.against("plain")
    columns = ("Configuration", "Setting", "Value", plain, "Differs", "Read from", "Remark")
    rows = [
        TableRow(
            [
                TableCell(study.label(row.config)),
                *(TableCell(said or text.DASH) for said in (row.setting, row.value, row.plain)),
                TableCell(text.compact(row.differs)),
                TableCell(row.source or text.DASH),
                TableCell(row.reason),
            ]
        )
        for row in study.engine
    ]
    return table("settings", columns, rows)
