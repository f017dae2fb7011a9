"""Figure 8: is the stacked connector's tax the sum of its parts' taxes (H4), at ref_safe?"""

from matplotlib.axes import Axes

from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 8: additivity of stacked connectors at ref_safe"
CAPTION = (
    "Is the stacked connector's tax the sum of its parts' taxes (H4)? Taxes of both parts, of "
    "their sum and of the stack at ref_safe, with 95 % intervals; the sum's interval adds the "
    "ends of its parts' intervals and so is conservative. A study of one block has no intervals: "
    "one launch, launches not included. An open triangle marks a tax from a cell in which a server "
    "was saturated or dropped arrivals: it gets no verdict. The dotted bracket is the tolerance "
    "around the stack's tax within which the sum counts as additive."
)
PARTS = ("mooncake_both", "lmcache_only")
STACKED = "multi_mooncake_lmcache"
SUM = "sum of the two"
ROW_IN = 0.2
COLUMNS = (*bars.TAX_COLUMNS, "tolerance_lo", "tolerance_hi")


def _valid(rows: dict[str, TaxRow], config: str) -> TaxRow | None:
    row = rows.get(config)
    return row if row is not None and row.status == "valid" and row.tax is not None else None


def sum_interval(parts: list[TaxRow]) -> tuple[float, float] | None:
    """Sums of the lower and of the upper ends.

    Conservative: it holds whatever the dependence of the two (they share plain's launches).
    """
    lows = [part.tax_lo for part in parts if part.tax_lo is not None]
    highs = [part.tax_hi for part in parts if part.tax_hi is not None]
    complete = len(lows) == len(highs) == len(parts)
    return (sum(lows), sum(highs)) if complete else None


def _sum_bar(study: StudyTables, axes: Axes, y: float, parts: list[TaxRow]) -> list[float]:
    """The two parts end to end, with the interval of their sum; returns the numbers drawn."""
    start = 0.0
    for part in parts:
        color = style.marks(study)[part.config].color
        axes.barh(y, part.tax or 0.0, left=start, height=0.7, color=color, zorder=3)
        start += part.tax or 0.0
    ends = sum_interval(parts)
    if ends is None:
        return [start]
    axes.plot(ends, [y, y], color="black", lw=0.7, zorder=5)
    for end in ends:
        axes.plot([end, end], [y - 0.08, y + 0.08], color="black", lw=0.7, zorder=5)
    return [start, *ends]


def _panel(study: StudyTables, axes: Axes, metric: str, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    rows = study.taxes_at("ref_safe", metric)
    band = bars.aa_interval(study, "ref_safe", metric)
    parts = [row for row in (_valid(rows, config) for config in PARTS) if row is not None]
    whole = _valid(rows, STACKED)
    tolerance = study.settings["hypotheses"]["h4_tolerance"]
    allowed = (
        sorted(f * (whole.tax or 0.0) for f in (1 - tolerance, 1 + tolerance)) if whole else []
    )
    ends = sum_interval(parts) or ()
    known = [value for row in (*parts, whole) for value in bars.numbers(row)]
    bars.tax_axis(axes, [*known, *ends, *allowed, sum(p.tax or 0.0 for p in parts)], room=0.3)
    bars.aa_band(axes, band)
    records = []
    for index, config in enumerate((*PARTS, SUM, STACKED)):
        row = rows.get(config)
        record = bars.tax_record(row, config, metric, "ref_safe") | dict.fromkeys(COLUMNS[-2:])
        if band:
            record["aa_lo"], record["aa_hi"] = band
        records.append(record)
        if config == SUM:
            _add_sum(study, axes, index, parts, allowed, record, width_in)
        elif (valid := _valid(rows, config)) is None:
            bars.no_number(axes, index, 0.75, row, width_in)
        else:
            axes.barh(index, valid.tax or 0.0, height=0.7, color=marks[config].color, zorder=3)
            bars.interval(axes, index, valid)
            bars.beside(axes, index, bars.numbers(valid), style.percent(valid.tax or 0.0))
            if valid.mark:
                bars.overload_mark(axes, valid.tax or 0.0, index)
    axes.set_title(bars.METRIC_LABELS[metric], loc="left")
    return records


def _add_sum(
    study: StudyTables, axes: Axes, index: int, parts: list[TaxRow], allowed: list[float],
    record: dict[str, object], width_in: float,
) -> None:  # fmt: skip
    """The sum's bar over the bracket it must end in to count as additive, and its CSV row."""
    if len(parts) < len(PARTS):
        bars.no_number(axes, index, 0.75, None, width_in)
        record["reason"] = "a part has no valid tax"
        return
    drawn = _sum_bar(study, axes, index, parts)
    bars.beside(axes, index, [*drawn, *allowed], style.percent(drawn[0]))
    record |= {"tax": drawn[0], "status": "valid", "rate_rps": parts[0].rate_rps}
    record |= {"family": parts[0].family, "mark": "; ".join(p.mark for p in parts if p.mark)}
    if record["mark"]:
        bars.overload_mark(axes, drawn[0], index)
    if len(drawn) == 3:
        record["tax_lo"], record["tax_hi"] = drawn[1:]
    if allowed:
        record["tolerance_lo"], record["tolerance_hi"] = allowed
        for end in allowed:
            axes.plot([end, end], [index - 0.45, index + 0.45], color="black", lw=0.7,
                      linestyle=(0, (1, 1.2)), zorder=4.5)  # fmt: skip


def draw(study: StudyTables) -> Picture:
    """Bars of both parts, of their sum with its interval, and of the stack, over the A/A band."""
    absent = bars.no_reference(study, TITLE)
    if absent:
        return absent
    missing = [c for c in (*PARTS, STACKED) if c not in {item.id for item in study.configurations}]
    if missing:
        return style.absent(study, TITLE, f"not in this study: {', '.join(missing)}.")
    names = {item.id: item.label for item in study.configurations}
    labels = [names[PARTS[0]], names[PARTS[1]], SUM, names[STACKED]]
    panel = ROW_IN * len(labels)
    left = 0.15 + style.label_margin_in(labels, 6)
    width = (style.COLUMN_IN - left - 0.18) / 2
    metrics = list(bars.METRIC_LABELS)
    rows = [row for metric in metrics for row in study.taxes_at("ref_safe", metric).values()
            if row.config in (*PARTS, STACKED)]  # fmt: skip
    figure = style.new_figure(study, style.COLUMN_IN, panel + 1.05, bars.sample_note(rows))
    records: list[dict[str, object]] = []
    for position, metric in enumerate(metrics):
        axes = style.axes_in(figure, left + position * (width + 0.12), 0.82, width, panel)
        records += _panel(study, axes, metric, width - 0.08)
        bars.row_labels(axes, labels if position == 0 else [""] * len(labels), 1.2)
    tolerance = study.settings["hypotheses"]["h4_tolerance"]
    overload = "; ▽ saturated or dropped arrivals: no verdict" if bars.marked(rows) else ""
    height = figure.get_figheight()
    figure.text(
        0.06 / style.COLUMN_IN, 0.19 / height,
        f"dotted: ±{100 * tolerance:g} % of the stack's tax; a sum inside is additive (H4)\n"
        f"{bars.interval_text(rows)}; {bars.family_text(rows)}{overload}\n{bars.aa_text(study)}",
        fontsize=5, va="bottom", linespacing=1.3,
    )  # fmt: skip
    return Picture(figure, COLUMNS, records)
