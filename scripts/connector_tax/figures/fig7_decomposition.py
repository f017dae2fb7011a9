"""Figure 7: each tax at ref_safe and each step's cost, split into two parts that add up to it.

Framework cost = tax(no-op connector); implementation cost = tax(configuration) - tax(no-op). A step
tax splits into the three timed callbacks and what they do not explain. Both parts of a row start at
zero, so that no part shifts another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from connector_tax.artifacts.tables import StepTaxRow, TaxRow
from connector_tax.figures import rows, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import DESIGN_MARKS
from connector_tax.text import signed, size

NOOP = "noop_connector"
CALLBACKS = "tax_callback_p50"
FRAMEWORK_COLOR = DESIGN_MARKS[NOOP].color
IMPLEMENTATION_COLOR = "#1B3A6B"
CALLBACK_COLOR = "#7A5195"
ROW_IN = 0.3
HALF = 0.24  # of a row: how far the two bars of a row lie from its middle
ROOM = 0.24  # of an axis, for the number at a bar's end
STEP_COLUMNS = ("step_tax_us", "step_tax_lo_us", "step_tax_hi_us", "callback_us", "unattributed_us")
COLUMNS = (*rows.TAX_COLUMNS, "framework_tax", "implementation_tax", *STEP_COLUMNS)
# Of a step: its metric in the records, its step tax, the panel's title.
STEPS = (
    ("step_p50", "tax_step_p50", "Per step: schedule()"),
    ("engine_step_p50", "tax_engine_step_p50", "Per step: whole engine step"),
)


@dataclass(frozen=True)
class _Row:
    """What is drawn of one configuration.

    Attributes:
        parts: the two parts of the total; None without a split, and where a part is zero by
            definition.
        total: with the ends of its interval; None without a number.
        words: the total in words, or why there is none.
    """

    parts: tuple[float | None, float | None]
    total: float | None
    ends: tuple[float | None, float | None]
    words: str


def draw(study: StudyTables) -> Picture:
    """Two parts and the total of each configuration: TTFT p90, TPOT p90, and two step durations."""
    name = "fig7_decomposition"
    absent = rows.no_steps(study, name) or rows.no_reference(study, name)
    if absent:
        return absent
    noop = {metric: _noop_tax(study, metric) for metric in rows.METRICS}
    engine = study.step_taxes_at("ref_safe", STEPS[1][1]).values()
    steps = STEPS if any(row.us is not None for row in engine) else STEPS[:1]
    notes = [f"{rows.aa_text(study)}; {rows.sample_text(_rows_at_safe(study))}"]
    if noop["ttft_p90"] is None:
        state = rows.state_text(study.taxes_at("ref_safe", "ttft_p90").get(NOOP))
        notes.append(f"not split into framework and implementation: no-op {state}")
    if len(steps) == 1:
        notes.append("the records have no whole engine steps")
    height = 2 * (ROW_IN * len(study.connectors) + 0.5) + 0.25
    figure = style.new_figure(study, style.PAGE_IN, height, notes)
    grid = figure.subplots(2, 2, sharey=True)
    records: list[dict[str, object]] = []
    for axes, metric in zip(grid[0], rows.METRICS, strict=True):
        records += _tax_panel(study, axes, metric, noop[metric])
    for axes, step in zip(grid[1], steps, strict=False):
        records += _step_panel(study, axes, *step)
    if len(steps) == 1:
        grid[1, 1].set_axis_off()
    style.legend(figure, _handles(noop["ttft_p90"] is not None), 5)
    return style.picture(figure, COLUMNS, records)


def _rows_at_safe(study: StudyTables) -> list[TaxRow]:
    return list(study.taxes_at("ref_safe", "ttft_p90").values())


def _noop_tax(study: StudyTables, metric: str) -> float | None:
    row = study.taxes_at("ref_safe", metric).get(NOOP)
    return row.tax if row is not None and row.status == "valid" else None


# ---- the two kinds of panels


def _tax_panel(
    study: StudyTables, axes: Axes, metric: str, noop: float | None
) -> list[dict[str, object]]:
    taxes = study.taxes_at("ref_safe", metric)
    aa = rows.aa_interval(study, "ref_safe", metric)
    records, drawn = [], []
    for item in study.connectors:
        tax = taxes.get(item.id)
        row = _tax_row(tax, noop, is_noop=item.id == NOOP)
        record = dict.fromkeys(COLUMNS) | rows.tax_record(tax, item.id, metric, "ref_safe", aa)
        if noop is not None and row.total is not None:
            record |= {"framework_tax": noop, "implementation_tax": row.total - noop}
        records.append(record)
        drawn.append(row)
    values = [value for row in drawn for value in (*row.parts, row.total, *row.ends)]
    known = [value for value in values if value is not None]
    rows.tax_scale(axes, known, room=ROOM)
    colors = (FRAMEWORK_COLOR, IMPLEMENTATION_COLOR)
    rows.shade(axes, aa)
    for index, (item, row) in enumerate(zip(study.connectors, drawn, strict=True)):
        # The framework's bar is the same in every row: its number stands at the first.
        _draw_row(axes, index, row, colors, _percent, (item.id == NOOP, True))
    rows.prepare(axes, [c.label for c in study.connectors], f"{rows.METRICS[metric]}, %")
    axes.set_xlabel(rows.tax_label(study, axes))
    return records


def _percent(value: float) -> str:
    return size(100 * value)


def _tax_row(tax: TaxRow | None, noop: float | None, is_noop: bool) -> _Row:
    if tax is None or tax.tax is None or tax.status != "valid":
        return _Row((None, None), None, (None, None), rows.state_text(tax))
    rest = None if noop is None or is_noop else tax.tax - noop
    return _Row((noop, rest), tax.tax, (tax.tax_lo, tax.tax_hi), rows.tax_size(tax))


def _step_panel(
    study: StudyTables, axes: Axes, metric: str, tax_name: str, title: str
) -> list[dict[str, object]]:
    taxes = study.step_taxes_at("ref_safe", tax_name)
    callbacks = study.step_taxes_at("ref_safe", CALLBACKS)
    records, drawn = [], []
    for item in study.connectors:
        tax = taxes.get(item.id)
        row = _step_row(tax, callbacks.get(item.id))
        known = study.taxes_at("ref_safe", "ttft_p90").get(item.id)
        record = dict.fromkeys(COLUMNS) | rows.tax_record(known, item.id, metric, "ref_safe")
        record |= dict.fromkeys((*rows.ENDS, "verdict"))
        if tax is not None and tax.us is not None:
            values = (tax.us, tax.lo_us, tax.hi_us, *row.parts)
            record |= dict(zip(STEP_COLUMNS, values, strict=True))
            record |= {"aa_lo": tax.aa_lo_us, "aa_hi": tax.aa_hi_us}
        records.append(record)
        drawn.append(row)
    noise = next((row for row in taxes.values() if row.aa_us is not None), None)
    aa = rows.band(noise.aa_us, noise.aa_lo_us, noise.aa_hi_us) if noise else None
    _step_scale(axes, drawn)
    rows.shade(axes, aa)
    for index, row in enumerate(drawn):
        _draw_row(axes, index, row, (CALLBACK_COLOR, "white"), _whole, (True, True))
    rows.prepare(axes, [c.label for c in study.connectors], f"{title}, µs")
    axes.set_xlabel(study.against("median over plain's (µs)"))
    return records


def _whole(value: float) -> str:
    return signed(value, 0)


def _step_row(tax: StepTaxRow | None, callback: StepTaxRow | None) -> _Row:
    if tax is None or tax.us is None:
        reason = tax.reason if tax is not None else "missing"
        return _Row((None, None), None, (None, None), reason)
    spent = callback.us if callback is not None else None
    rest = None if spent is None else tax.us - spent
    words = size(tax.us, tax.lo_us, tax.hi_us)
    return _Row((spent, rest), tax.us, (tax.lo_us, tax.hi_us), words)


def _step_scale(axes: Axes, drawn: Sequence[_Row]) -> None:
    values = [value for row in drawn for value in (*row.parts, row.total, *row.ends)]
    known = [0.0, *(value for value in values if value is not None)]
    low, high = min(known), max(known)
    room = ROOM * (high - low or 1.0)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    axes.grid(axis="x")


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
        rows.lost(axes, index, 0.8, row.words, 1.3)
        return
    places = zip(row.parts, colors, (index - HALF, index + HALF), numbered, strict=True)
    for part, color, y, with_number in places:
        if part is None:
            continue
        edge = CALLBACK_COLOR if color == "white" else color
        axes.barh(y, part, height=2 * HALF - 0.06, color=color, zorder=3, lw=0.6, edgecolor=edge)
        if with_number:
            side = -1 if part < 0 else 1
            axes.annotate(
                text(part), (part, y), xytext=(2.5 * side, 0), textcoords="offset points",
                ha="left" if side > 0 else "right", va="center_baseline", zorder=6,
            )  # fmt: skip
    rows.interval(axes, index, *row.ends)
    axes.plot([row.total], [index], "D", color="black", ms=2.8, mew=0, zorder=5.5)
    rows.beside(axes, index, row.words)


def _handles(split: bool) -> list[Artist]:
    parts = [
        Patch(color=FRAMEWORK_COLOR, label="framework (no-op connector)"),
        Patch(color=IMPLEMENTATION_COLOR, label="implementation"),
    ]
    return [
        *(parts if split else []),
        Patch(color=CALLBACK_COLOR, label="callbacks"),
        Patch(facecolor="white", edgecolor=CALLBACK_COLOR, lw=0.6, label="not in callbacks"),
        Line2D([], [], color="black", marker="D", ms=2.8, mew=0, lw=0.7, label="tax, interval"),
    ]
