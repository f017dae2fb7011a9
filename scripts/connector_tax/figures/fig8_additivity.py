"""Figure 8: is the stacked connector's tax the sum of its parts' taxes (H4), at ref_safe?"""

from matplotlib.axes import Axes

from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.text import size

PARTS = ("mooncake_both", "lmcache_only")
STACKED = "multi_mooncake_lmcache"
SUM = "sum of the two"
ROW_IN = 0.22
COLUMNS = (*rows.TAX_COLUMNS, "tolerance_lo", "tolerance_hi")


def draw(study: StudyTables) -> Picture:
    """Bars of both parts, of their sum with its interval, and of the stack, over the A/A band."""
    absent = rows.no_reference(study, "fig8_additivity")
    if absent:
        return absent
    names = {item.id: item.label for item in study.configurations}
    missing = [config for config in (*PARTS, STACKED) if config not in names]
    if missing:
        reason = f"not in this study: {', '.join(missing)}."
        return style.absent(study, "fig8_additivity", reason)
    tolerance = study.settings["hypotheses"]["h4_tolerance"]
    shown = [
        row
        for metric in rows.METRICS
        for row in study.taxes_at("ref_safe", metric).values()
        if row.config in (*PARTS, STACKED)
    ]
    notes = [
        f"dotted: ±{100 * tolerance:g} % of the stack's tax; a sum inside is additive (H4)",
        rows.interval_text(shown),
        f"{rows.family_text(shown)}; {rows.sample_text(shown)}",
        rows.aa_text(study),
    ]
    figure = style.new_figure(study, style.COLUMN_IN, 2 * (4 * ROW_IN + 0.4) + 0.2, notes)
    grid = figure.subplots(2, sharex=True)
    records: list[dict[str, object]] = []
    labels = [names[PARTS[0]], names[PARTS[1]], SUM, names[STACKED]]
    panels = {metric: _panel_rows(study, metric, tolerance) for metric in rows.METRICS}
    scale = [value for rows_ in panels.values() for row in rows_ for value in _numbers(row)]
    for axes, (metric, bars) in zip(grid, panels.items(), strict=True):
        rows.tax_scale(axes, scale)
        rows.shade(axes, rows.aa_interval(study, "ref_safe", metric))
        for index, record in enumerate(bars):
            _bar(study, axes, index, record, bars)
        rows.prepare(axes, labels, rows.METRICS[metric])
        records += bars
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    style.legend(figure, rows.overload_handles(shown), 1)
    return style.picture(figure, COLUMNS, records)


def _numbers(record: dict[str, object]) -> list[float]:
    values = [record[name] for name in (*rows.ENDS, "tolerance_lo", "tolerance_hi")]
    return [value for value in values if isinstance(value, float)]


def _panel_rows(study: StudyTables, metric: str, tolerance: float) -> list[dict[str, object]]:
    """The rows of one metric, top to bottom: both parts, their sum, the stack."""
    taxes = study.taxes_at("ref_safe", metric)
    aa = rows.aa_interval(study, "ref_safe", metric)
    records = [
        dict.fromkeys(COLUMNS) | rows.tax_record(taxes.get(config), config, metric, "ref_safe", aa)
        for config in (*PARTS, SUM, STACKED)
    ]
    parts = [row for row in map(taxes.get, PARTS) if row is not None and rows.numbers(row)]
    if len(parts) < len(PARTS):
        records[2]["reason"] = "a part has no valid tax"
        return records
    whole = taxes.get(STACKED)
    records[2] |= {"status": "valid", "rate_rps": parts[0].rate_rps, "family": parts[0].family}
    records[2]["mark"] = "; ".join(part.mark for part in parts if part.mark)
    records[2] |= dict(zip(rows.ENDS, _sums(parts), strict=True))
    if whole is not None and whole.tax is not None and rows.numbers(whole):
        ends = sorted(f * whole.tax for f in (1 - tolerance, 1 + tolerance))
        records[2] |= dict(zip(("tolerance_lo", "tolerance_hi"), ends, strict=True))
    return records


def _sums(parts: list[TaxRow]) -> list[float | None]:
    """Sums of the points, of the lower and of the upper ends.

    Conservative: it holds whatever the dependence of the two (they share plain's launches).
    """
    columns = ([getattr(part, name) for part in parts] for name in rows.ENDS)
    return [None if None in values else sum(values) for values in columns]


def _bar(
    study: StudyTables, axes: Axes, index: int, record: dict[str, object],
    panel: list[dict[str, object]],
) -> None:  # fmt: skip
    """One bar with its interval; the sum's is its parts end to end, in the tolerance's bracket."""
    tax, low, high = (record[name] for name in rows.ENDS)
    if not isinstance(tax, float):
        state = f"{record['status']}: {record['reason']}" if record["reason"] else record["status"]
        rows.lost(axes, index, 0.75, str(state), 1.3)
        return
    marks = style.marks(study)
    start = 0.0
    for part in panel[:2] if record["config"] == SUM else [record]:
        width = part["tax"]
        assert isinstance(width, float)
        color = marks[str(part["config"])].color
        axes.barh(index, width, left=start, height=0.7, color=color, zorder=3, lw=0)
        start += width
    if isinstance(low, float) and isinstance(high, float):
        rows.interval(axes, index, low, high)
        rows.beside(axes, index, size(100 * tax, 100 * low, 100 * high))
    else:
        rows.beside(axes, index, size(100 * tax))
    for end in (record["tolerance_lo"], record["tolerance_hi"]):
        if isinstance(end, float):
            axes.plot([end, end], [index - 0.45, index + 0.45], color="black", lw=0.9,
                      ls=(0, (1, 1.2)), zorder=4.5)  # fmt: skip
    if record["mark"]:
        axes.plot(tax, index, zorder=7, **rows.OVERLOAD)
