"""Figure 7: each tax at ref_safe split into framework and implementation, and each step's cost.

Framework cost = tax(no-op connector); implementation cost = tax(configuration) - tax(no-op). The
lower panels split the tax on schedule() (the design's step tax) and on the whole engine step into
the three timed callbacks and what they do not explain.
"""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from connector_tax.figures import bars, style
from connector_tax.figures.marks import DESIGN_MARKS
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import POOLED, Study, TaxRow

TITLE = "Figure 7: decomposition of the tax at ref_safe"
CAPTION = (
    "Each tax at ref_safe split into framework cost, the tax of the no-op connector, and "
    "implementation cost, the rest. A crossed part is negative: the configuration costs less than"
    " the no-op connector. The lower panels split the tax on schedule() and on the whole engine"
    " step into the three timed connector callbacks (solid) and what they do not account for"
    " (open). Of the callbacks only build_connector_meta runs inside schedule(), so there their sum"
    " can exceed the tax (crossed). The grey band is the A/A noise floor."
)
NOOP = "noop_connector"
ROW_IN = 0.125
GAP_IN = 0.48  # title above and axis below a panel
COLUMNS = (
    *bars.TAX_COLUMNS, "framework_tax", "implementation_tax", "step_tax_us", "callback_us",
    "unattributed_us", "step_tax_us_by_block",
)  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """One duration of a step: its metric's name, TaxRow's and StepRow's column, the title."""

    metric: str
    tax: str
    block_tax: str
    title: str


SCHEDULE = _Step("step_p50", "step_tax_us", "tax_step_p50", "Per step: schedule()")
ENGINE = _Step(
    "engine_step_p50", "engine_step_tax_us", "tax_engine_step_p50", "Per step: whole engine step"
)


def _noop_tax(study: Study, metric: str) -> float | None:
    row = study.taxes_at("ref_safe", metric).get(NOOP)
    return row.tax if row is not None and row.status == "valid" else None


def _stack(axes: Axes, y: float, first: float, total: float, color: str) -> None:
    """Framework up to `first`, implementation from there to `total`; crossed if negative.

    A negative framework part lies under the implementation's bar: it is drawn narrow, over it.
    """
    below = first < 0
    axes.barh(
        y, first, height=0.26 if below else 0.72, zorder=3.8 if below else 3, lw=0.6,
        color="white" if below else DESIGN_MARKS[NOOP].color, edgecolor=DESIGN_MARKS[NOOP].color,
        hatch="xxxxxx" if below else None,
    )  # fmt: skip
    negative = total < first
    axes.barh(
        y, total - first, left=first, height=0.72, zorder=3.5, lw=0.6, edgecolor=color,
        color="white" if negative else color, hatch="xxxxxx" if negative else None,
    )  # fmt: skip


def _tax_panel(study: Study, axes: Axes, metric: str, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    taxes = study.taxes_at("ref_safe", metric)
    noop = _noop_tax(study, metric)
    band = bars.aa_interval(study, "ref_safe", metric)
    bars.tax_axis(axes, [value for row in taxes.values() for value in bars.numbers(row)])
    bars.aa_band(axes, band)
    records = []
    for index, item in enumerate(study.connectors):
        row = taxes.get(item.id)
        record = bars.tax_record(row, item.id, metric, "ref_safe") | dict.fromkeys(COLUMNS[-6:])
        if band:
            record["aa_lo"], record["aa_hi"] = band
        records.append(record)
        if row is None or row.status != "valid" or row.tax is None:
            bars.no_number(axes, index, 0.8, row, width_in)
            continue
        if noop is None:
            axes.barh(index, row.tax, height=0.72, color=marks[item.id].color, zorder=3)
        else:
            _stack(axes, index, noop, row.tax, marks[item.id].color)
            record |= {"framework_tax": noop, "implementation_tax": row.tax - noop}
        bars.interval(axes, index, row)
        bars.beside(axes, index, bars.numbers(row), style.percent(row.tax))
    bars.row_labels(axes, [item.label for item in study.connectors], 1.2)
    axes.set_title(bars.METRIC_LABELS[metric], loc="left")
    return records


def _step_panel(study: Study, axes: Axes, step: _Step, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    taxes = study.taxes_at("ref_safe", "ttft_p90")
    records = []
    ends = [0.0]
    for index, item in enumerate(study.connectors):
        row = taxes.get(item.id)
        record = bars.tax_record(row, item.id, step.metric, "ref_safe")
        record |= dict.fromkeys(COLUMNS[-6:])
        record |= dict.fromkeys(("tax", "tax_lo", "tax_hi", "verdict"))
        records.append(record)
        tax = _step_tax(row, step)
        if row is None or tax is None:
            continue
        record |= {
            "step_tax_us": tax,
            "callback_us": row.callback_us,
            "unattributed_us": None if row.callback_us is None else tax - row.callback_us,
        }
        blocks = _block_taxes(study, row, step)
        record["step_tax_us_by_block"] = " ".join(map(repr, blocks))
        ends += _step_bar(axes, index, (tax, row.callback_us or 0.0), blocks, marks[item.id].color)
    span = max(ends) - min(ends) or 1.0
    axes.set_xlim(min(ends) - 0.04 * span, max(ends) + 0.2 * span)
    for index, item in enumerate(study.connectors):
        row = taxes.get(item.id)
        if _step_tax(row, step) is None:
            bars.no_number(axes, index, 0.8, row, width_in)
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    _step_noise(study, axes, step)
    axes.grid(axis="x")
    axes.set_xlabel("p50 over plain (µs)")
    bars.row_labels(axes, [item.label for item in study.connectors], 1.2)
    axes.set_title(step.title, loc="left")
    return records


def _step_tax(row: TaxRow | None, step: _Step) -> float | None:
    value: float | None = getattr(row, step.tax, None)
    return value


def _block_taxes(study: Study, row: TaxRow, step: _Step) -> list[float]:
    """The step tax of each block, in µs; empty for a study of one block."""
    taxes = [
        getattr(found, step.block_tax)
        for found in study.steps
        if (found.config, found.phase, found.cell) == (row.config, row.phase, row.cell)
        and found.block != POOLED
        and getattr(found, step.block_tax) is not None
    ]
    return taxes if len(taxes) > 1 else []


def _step_bar(
    axes: Axes, y: float, parts: tuple[float, float], blocks: list[float], color: str
) -> list[float]:
    """Callbacks solid, the rest of the step tax open; crossed where callbacks exceed the tax."""
    tax, callback = parts
    axes.barh(y, callback, height=0.72, color=color, zorder=3)
    negative = tax < callback
    axes.barh(
        y, tax - callback, left=callback, height=0.72, zorder=3.5, lw=0.6, edgecolor=color,
        color="white", hatch="xxxxxx" if negative else None, alpha=1,
    )  # fmt: skip
    axes.plot(blocks, [y] * len(blocks), ".", color="black", ms=2.2, mew=0, zorder=6)
    bars.beside(axes, y, [tax, callback, *blocks], f"{tax:+.0f}".replace("-", style.MINUS))
    return [tax, callback, *blocks]


def _step_noise(study: Study, axes: Axes, step: _Step) -> None:
    """The A/A band of the step tax: what plain's own closing launch differs by."""
    tax = _step_tax(study.noise_at("ref_safe", "ttft_p90"), step)
    if tax is not None:
        bars.aa_band(axes, (-abs(tax), abs(tax)))


def draw(study: Study) -> Picture:
    """Stacked bars per configuration: tax on TTFT p90, on TPOT p90, and microseconds per step."""
    absent = bars.no_steps(study, TITLE) or bars.no_reference(study, TITLE)
    if absent:
        return absent
    panel = ROW_IN * len(study.connectors)
    left = 0.15 + style.label_margin_in([item.label for item in study.connectors], 6)
    width = style.COLUMN_IN - left - 0.1
    rows = list(study.taxes_at("ref_safe", "ttft_p90").values())
    whole = any(row.engine_step_tax_us is not None for row in rows if row.config != study.aa)
    panels: list[str | _Step] = ["ttft_p90", "tpot_p90", SCHEDULE]
    if whole:
        panels.append(ENGINE)
    height = len(panels) * (panel + GAP_IN) + 0.5
    figure = style.new_figure(study, style.COLUMN_IN, height, bars.sample_note(rows))
    records: list[dict[str, object]] = []
    for position, drawn in enumerate(reversed(panels)):
        axes = style.axes_in(figure, left, 0.78 + position * (panel + GAP_IN), width, panel)
        if isinstance(drawn, _Step):
            records += _step_panel(study, axes, drawn, width - 0.1)
        else:
            records += _tax_panel(study, axes, drawn, width - 0.1)
    _legend(study, figure, whole)
    return Picture(figure, COLUMNS, records)


def _legend(study: Study, figure: Figure, whole: bool) -> None:
    height = figure.get_figheight()
    example = DESIGN_MARKS["mooncake_both"].color
    if _noop_tax(study, "ttft_p90") is None:
        row = study.taxes_at("ref_safe", "ttft_p90").get(NOOP)
        words = [f"not split into framework and implementation: no-op {bars.state_text(row)}"]
        handles = []
    else:
        words = []
        handles = [
            Patch(color=DESIGN_MARKS[NOOP].color, label="framework (no-op)"),
            Patch(color=example, label="implementation, or callbacks"),
        ]
    handles.append(Patch(facecolor="white", edgecolor=example, lw=0.6, label="not in callbacks"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.38 / height), ncols=3,
        frameon=False, fontsize=5.5, handlelength=1.2, columnspacing=0.9, borderaxespad=0.1,
    )  # fmt: skip
    marks = "crossed: negative; dots: single blocks"
    if not whole:
        marks += "; the records have no whole engine steps"
    words += [marks, bars.aa_text(study)]
    text = "\n".join(style.fitted(line, style.COLUMN_IN - 0.12, 5) for line in words)
    figure.text(0.06 / style.COLUMN_IN, 0.19 / height, text, fontsize=5, va="bottom")
