"""Figure 7: each tax at ref_safe and each step's cost, split into two parts that add up to it.

Framework cost = tax(no-op connector); implementation cost = tax(configuration) - tax(no-op). A step
tax splits into the three timed callbacks and what they do not explain. Both parts of a row start at
zero, so that no part shifts another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from connector_tax.artifacts.tables import StepTaxRow, TaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import Configuration, StudyTables
from connector_tax.marks import DESIGN_MARKS

TITLE = "Figure 7: decomposition of the tax at ref_safe"
CAPTION = (
    "Each tax at ref_safe (diamond, with its 95 % interval, in figures at the right) and its two"
    " parts, both drawn from zero. Upper panels: framework cost, the tax of the no-op connector,"
    " and implementation cost, the rest. Lower panels: the step taxes on schedule() and on the"
    " whole engine step, the three timed connector callbacks, and what these do not account for; of"
    " the callbacks only build_connector_meta runs inside schedule(), so there the rest is negative"
    " where the others cost more. The grey band is the A/A noise floor."
)
NOOP = "noop_connector"
CALLBACKS = "tax_callback_p50"
FRAMEWORK_COLOR = DESIGN_MARKS[NOOP].color
IMPLEMENTATION_COLOR = "#1B3A6B"
CALLBACK_COLOR = "#7A5195"
ROW_IN = 0.27
HEAD_IN, FOOT_IN, LEGEND_IN = 0.22, 0.4, 0.5
TOTAL_IN = 1.2  # the column of numbers right of a panel
LABEL_IN = 0.33  # the label of a bar
HALF = 0.22  # of a row: how far the two bars of a row lie from its middle
COLUMNS = (
    *bars.TAX_COLUMNS, "framework_tax", "implementation_tax", "step_tax_us", "step_tax_lo_us",
    "step_tax_hi_us", "callback_us", "unattributed_us",
)  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """One duration of a step: its metric in the records, its step tax, the panel's title."""

    metric: str
    tax: str
    title: str


SCHEDULE = _Step("step_p50", "tax_step_p50", "Per step: schedule()")
ENGINE = _Step("engine_step_p50", "tax_engine_step_p50", "Per step: whole engine step")


@dataclass(frozen=True)
class _Row:
    """What is drawn of one configuration.

    Attributes:
        parts: the two parts of the total; None without a split, and where a part is zero by
            definition.
        total: with the ends of its interval; None without a number.
        reason: why there is no number.
    """

    parts: tuple[float | None, float | None]
    total: float | None
    ends: tuple[float | None, float | None]
    reason: str = ""

    @property
    def drawn(self) -> list[float]:
        """Every number of the row."""
        values = (*self.parts, self.total, *self.ends)
        return [value for value in values if value is not None]


def draw(study: StudyTables) -> Picture:
    """Two parts and the total of each configuration: TTFT p90, TPOT p90, and two step durations."""
    absent = bars.no_steps(study, TITLE) or bars.no_reference(study, TITLE)
    if absent:
        return absent
    panel = ROW_IN * len(study.connectors)
    block = HEAD_IN + panel + FOOT_IN
    height = 2 * block + LEGEND_IN
    rows = list(study.taxes_at("ref_safe", "ttft_p90").values())
    figure = style.new_figure(study, style.PAGE_IN, height, bars.sample_note(rows))
    left = 0.12 + style.label_margin_in([c.label for c in study.connectors], style.TEXT_PT)
    width = (style.PAGE_IN - left - 2 * TOTAL_IN - 0.15) / 2
    records: list[dict[str, object]] = []
    panels: list[list[str | _Step]] = [["ttft_p90", "tpot_p90"], [SCHEDULE, ENGINE]]
    for line, pair in enumerate(panels):
        for column, drawn in enumerate(pair):
            if drawn is ENGINE and not _has_engine_steps(study):
                continue
            bottom = height - (line + 1) * block + FOOT_IN
            axes = style.axes_in(
                figure, left + column * (width + TOTAL_IN + 0.05), bottom, width, panel
            )
            if isinstance(drawn, _Step):
                records += _step_panel(study, axes, drawn)
            else:
                records += _tax_panel(study, axes, drawn)
            _names(axes, study.connectors, shown=column == 0)
    _legend(study, figure)
    return Picture(figure, COLUMNS, records)


def _has_engine_steps(study: StudyTables) -> bool:
    rows = study.step_taxes_at("ref_safe", ENGINE.tax).values()
    return any(row.us is not None for row in rows)


def _noop_tax(study: StudyTables, metric: str) -> float | None:
    row = study.taxes_at("ref_safe", metric).get(NOOP)
    return row.tax if row is not None and row.status == "valid" else None


# ---- the two kinds of panels


def _tax_panel(study: StudyTables, axes: Axes, metric: str) -> list[dict[str, object]]:
    taxes, noop = study.taxes_at("ref_safe", metric), _noop_tax(study, metric)
    band = bars.aa_interval(study, "ref_safe", metric)
    records, rows = [], []
    for item in study.connectors:
        tax = taxes.get(item.id)
        row = _tax_row(tax, noop, is_noop=item.id == NOOP)
        record = bars.tax_record(tax, item.id, metric, "ref_safe")
        record |= dict.fromkeys(COLUMNS[len(bars.TAX_COLUMNS) :])
        if band:
            record["aa_lo"], record["aa_hi"] = band
        if noop is not None and row.total is not None:
            record |= {"framework_tax": noop, "implementation_tax": row.total - noop}
        records.append(record)
        rows.append(row)
    values = [value for row in rows for value in row.drawn]
    # Room for the label of a negative bar, on the axis' own scale.
    lowest = min([0.0, *(part for row in rows for part in row.parts if part is not None)])
    bars.tax_axis(axes, [*values, 1.25 * lowest], room=0.25)
    bars.aa_band(axes, band)
    colors = (FRAMEWORK_COLOR, IMPLEMENTATION_COLOR)
    for index, (item, row) in enumerate(zip(study.connectors, rows, strict=True)):
        # The framework's bar is the same in every row: its number stands at the first.
        numbered = (item.id == NOOP, True)
        _draw_row(axes, index, row, colors, style.percent, numbered)
    axes.set_title(bars.METRIC_LABELS[metric] + ", %", loc="left")
    return records


def _tax_row(tax: TaxRow | None, noop: float | None, is_noop: bool) -> _Row:
    if tax is None or tax.status != "valid" or tax.tax is None:
        return _Row((None, None), None, (None, None), reason=bars.state_text(tax))
    rest = None if noop is None or is_noop else tax.tax - noop
    return _Row((noop, rest), tax.tax, (tax.tax_lo, tax.tax_hi))


def _step_panel(study: StudyTables, axes: Axes, step: _Step) -> list[dict[str, object]]:
    taxes = study.step_taxes_at("ref_safe", step.tax)
    callbacks = study.step_taxes_at("ref_safe", CALLBACKS)
    records, rows = [], []
    for item in study.connectors:
        tax, callback = taxes.get(item.id), callbacks.get(item.id)
        row = _step_row(tax, callback)
        known = study.taxes_at("ref_safe", "ttft_p90").get(item.id)
        record = bars.tax_record(known, item.id, step.metric, "ref_safe")
        record |= dict.fromkeys(COLUMNS[len(bars.TAX_COLUMNS) :])
        record |= dict.fromkeys(("tax", "tax_lo", "tax_hi", "verdict"))
        if tax is not None and tax.us is not None:
            record |= {
                "step_tax_us": tax.us, "step_tax_lo_us": tax.lo_us, "step_tax_hi_us": tax.hi_us,
                "callback_us": row.parts[0], "unattributed_us": row.parts[1],
                "aa_lo": tax.aa_lo_us, "aa_hi": tax.aa_hi_us,
            }  # fmt: skip
        records.append(record)
        rows.append(row)
    _step_axis(axes, rows)
    band = _step_noise(list(taxes.values()))
    bars.aa_band(axes, band)
    for index, row in enumerate(rows):
        _draw_row(axes, index, row, (CALLBACK_COLOR, "white"), style.signed, (True, True))
    axes.set_title(step.title + ", µs", loc="left")
    return records


def _step_row(tax: StepTaxRow | None, callback: StepTaxRow | None) -> _Row:
    if tax is None or tax.us is None:
        reason = tax.reason if tax is not None else "missing"
        return _Row((None, None), None, (None, None), reason=reason)
    spent = callback.us if callback is not None else None
    rest = None if spent is None else tax.us - spent
    return _Row((spent, rest), tax.us, (tax.lo_us, tax.hi_us))


def _step_noise(rows: Sequence[StepTaxRow]) -> tuple[float, float] | None:
    """The A/A band: the interval of plain over plain, or ±|it| where it has none."""
    row = next((row for row in rows if row.aa_us is not None), None)
    if row is None or row.aa_us is None:
        return None
    if row.aa_lo_us is not None and row.aa_hi_us is not None:
        return row.aa_lo_us, row.aa_hi_us
    return -abs(row.aa_us), abs(row.aa_us)


def _step_axis(axes: Axes, rows: Sequence[_Row]) -> None:
    values = [0.0, *(value for row in rows for value in row.drawn)]
    parts = [0.0, *(part for row in rows for part in row.parts if part is not None)]
    width_in = axes.get_window_extent().width / style.DPI
    low, high = min(values), max(values)
    span = (high - low or 1.0) / (1 - LABEL_IN / width_in)
    label = span * LABEL_IN / width_in
    low = min(low, min(parts) - label)
    high = max(high, max(parts) + label)
    axes.set_xlim(low - 0.03 * span, high + 0.03 * span)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    axes.grid(axis="x")
    axes.set_xlabel("median over plain's (µs)")


# ---- one row


def _draw_row(
    axes: Axes,
    index: int,
    row: _Row,
    colors: tuple[str, str],
    text: Callable[[float], str],
    numbered: tuple[bool, bool],
) -> None:
    if row.total is None:
        low, high = axes.get_xlim()
        style.hatched(axes, low, index - 0.4, high - low, 0.8)
        _right(axes, index, style.fitted(row.reason, TOTAL_IN - 0.1, style.TEXT_PT), style.MUTED)
        return
    places = zip(row.parts, colors, (index - HALF, index + HALF), numbered, strict=True)
    for part, color, y, with_number in places:
        if part is None:
            continue
        axes.barh(
            y, part, height=2 * HALF - 0.04, color=color, zorder=3, lw=0.6,
            edgecolor=CALLBACK_COLOR if color == "white" else color,
        )  # fmt: skip
        if not with_number:
            continue
        side = -1 if part < 0 else 1
        axes.annotate(
            text(part), (part, y), xytext=(2.5 * side, 0), textcoords="offset points",
            ha="left" if side > 0 else "right", va="center_baseline", fontsize=style.TEXT_PT,
            zorder=6, annotation_clip=False,
        )  # fmt: skip
    low_end, high_end = row.ends
    if low_end is not None and high_end is not None:
        axes.plot([low_end, high_end], [index, index], color="black", lw=0.7, zorder=5)
    axes.plot([row.total], [index], "D", color="black", ms=2.6, mew=0, zorder=5.5)
    words = text(row.total)
    if low_end is not None and high_end is not None:
        words += f" [{text(low_end)}, {text(high_end)}]"
    _right(axes, index, style.fitted(words, TOTAL_IN, style.TEXT_PT), "black")


def _right(axes: Axes, index: int, text: str, color: str) -> None:
    axes.annotate(
        text, (1, index), xycoords=axes.get_yaxis_transform(), xytext=(4, 0),
        textcoords="offset points", va="center_baseline", fontsize=style.TEXT_PT, color=color,
        annotation_clip=False,
    )  # fmt: skip


def _names(axes: Axes, items: Sequence[Configuration], shown: bool) -> None:
    """The rows top to bottom, with their names on the left panels."""
    bars.row_labels(axes, [item.label if shown else "" for item in items], 1.1)
    axes.tick_params(labelsize=style.TEXT_PT)


def _legend(study: StudyTables, figure: Figure) -> None:
    split = _noop_tax(study, "ttft_p90") is not None
    handles: list[Patch | Line2D] = []
    if split:
        handles += [
            Patch(color=FRAMEWORK_COLOR, label="framework (no-op connector)"),
            Patch(color=IMPLEMENTATION_COLOR, label="implementation"),
        ]
    handles += [
        Patch(color=CALLBACK_COLOR, label="callbacks"),
        Patch(facecolor="white", edgecolor=CALLBACK_COLOR, lw=0.6, label="not in callbacks"),
        Line2D([], [], color="black", marker="D", ms=2.6, mew=0, lw=0.7, label="tax, interval"),
    ]
    height = figure.get_figheight()
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.36 / height), ncols=len(handles),
        frameon=False, fontsize=style.TEXT_PT, handlelength=1.2, columnspacing=1.2,
        borderaxespad=0.1,
    )  # fmt: skip
    words = [bars.aa_text(study)]
    if not split:
        row = study.taxes_at("ref_safe", "ttft_p90").get(NOOP)
        state = bars.state_text(row)
        words.insert(0, f"not split into framework and implementation: no-op {state}")
    if not _has_engine_steps(study):
        words.insert(0, "the records have no whole engine steps")
    text = style.fitted("; ".join(words), style.PAGE_IN - 0.12, style.TEXT_PT)
    figure.text(0.06 / style.PAGE_IN, 0.21 / height, text, fontsize=style.TEXT_PT, va="bottom")
