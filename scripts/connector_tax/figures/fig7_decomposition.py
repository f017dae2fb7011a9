"""Figure 7: each tax at ref_safe split into framework and implementation, and each step's cost.

Framework cost = tax(no-op connector); implementation cost = tax(configuration) - tax(no-op). The
lower panel splits the step tax into the three timed callbacks and what they do not explain.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from connector_tax.figures import bars, style
from connector_tax.figures.fig6_step_cdf import no_steps_reason
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import POOLED, Study, TaxRow

TITLE = "Figure 7: decomposition of the tax at ref_safe"
CAPTION = (
    "Each tax at ref_safe split into framework cost, the tax of the no-op connector, and "
    "implementation cost, the rest. A crossed part is negative: the configuration costs less than"
    " the no-op connector. The lowest panel splits the step tax into the three timed connector "
    "callbacks (solid) and what they do not account for (open). The grey band is the A/A noise "
    "floor."
)
NOOP = "noop_connector"
ROW_IN = 0.155
COLUMNS = (
    *bars.TAX_COLUMNS, "framework_tax", "implementation_tax", "step_tax_us", "callback_us",
    "unattributed_us", "step_tax_us_by_block",
)  # fmt: skip


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
        color="white" if below else style.MARKS[NOOP].color, edgecolor=style.MARKS[NOOP].color,
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


def _step_panel(study: Study, axes: Axes, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    taxes = study.taxes_at("ref_safe", "ttft_p90")
    records = []
    ends = [0.0]
    for index, item in enumerate(study.connectors):
        row = taxes.get(item.id)
        record = bars.tax_record(row, item.id, "step_p50", "ref_safe") | dict.fromkeys(COLUMNS[-6:])
        record |= dict.fromkeys(("tax", "tax_lo", "tax_hi", "verdict"))
        records.append(record)
        if row is None or row.step_tax_us is None:
            continue
        record |= {name: getattr(row, name) for name in COLUMNS[-4:-1]}
        blocks = _block_taxes(study, row)
        record["step_tax_us_by_block"] = " ".join(map(repr, blocks))
        ends += _step_bar(axes, index, row, blocks, marks[item.id].color)
    span = max(ends) - min(ends) or 1.0
    axes.set_xlim(min(ends) - 0.04 * span, max(ends) + 0.2 * span)
    for index, item in enumerate(study.connectors):
        row = taxes.get(item.id)
        if row is None or row.step_tax_us is None:
            bars.no_number(axes, index, 0.8, row, width_in)
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    _step_noise(study, axes)
    axes.grid(axis="x")
    axes.set_xlabel("step duration p50 over plain (µs)")
    bars.row_labels(axes, [item.label for item in study.connectors], 1.2)
    axes.set_title("Per step", loc="left")
    return records


def _block_taxes(study: Study, row: TaxRow) -> list[float]:
    """The step tax of each block, in µs; empty for a study of one block."""
    taxes = [
        step.tax_step_p50
        for step in study.steps
        if (step.config, step.phase, step.cell) == (row.config, row.phase, row.cell)
        and step.block != POOLED
        and step.tax_step_p50 is not None
    ]
    return taxes if len(taxes) > 1 else []


def _step_bar(axes: Axes, y: float, row: TaxRow, blocks: list[float], color: str) -> list[float]:
    """Callbacks solid, the rest of the step tax open; crossed where callbacks exceed the tax."""
    tax, callback = row.step_tax_us or 0.0, row.callback_us or 0.0
    axes.barh(y, callback, height=0.72, color=color, zorder=3)
    negative = tax < callback
    axes.barh(
        y, tax - callback, left=callback, height=0.72, zorder=3.5, lw=0.6, edgecolor=color,
        color="white", hatch="xxxxxx" if negative else None, alpha=1,
    )  # fmt: skip
    axes.plot(blocks, [y] * len(blocks), ".", color="black", ms=2.2, mew=0, zorder=6)
    bars.beside(axes, y, [tax, callback, *blocks], f"{tax:+.0f}".replace("-", style.MINUS))
    return [tax, callback, *blocks]


def _step_noise(study: Study, axes: Axes) -> None:
    """The A/A band of the step tax: what plain's own closing launch differs by."""
    row = study.taxes_at("ref_safe", "ttft_p90").get("plain_last")
    if row is not None and row.step_tax_us is not None:
        bars.aa_band(axes, (-abs(row.step_tax_us), abs(row.step_tax_us)))


def draw(study: Study) -> Picture:
    """Stacked bars per configuration: tax on TTFT p90, on TPOT p90, and microseconds per step."""
    reason = no_steps_reason(study)
    if reason:
        return style.absent(study, TITLE, reason)
    absent = bars.no_reference(study, TITLE)
    if absent:
        return absent
    panel = ROW_IN * len(study.connectors)
    left = 0.15 + style.label_margin_in([item.label for item in study.connectors], 6)
    width = style.COLUMN_IN - left - 0.1
    rows = list(study.taxes_at("ref_safe", "ttft_p90").values())
    figure = style.new_figure(study, style.COLUMN_IN, 3 * panel + 1.98, bars.sample_note(rows))
    records: list[dict[str, object]] = []
    for position, metric in enumerate(("ttft_p90", "tpot_p90", None)):
        bottom = 0.78 + (2 - position) * (panel + 0.5)
        axes = style.axes_in(figure, left, bottom, width, panel)
        if metric is None:
            records += _step_panel(study, axes, width - 0.1)
        else:
            records += _tax_panel(study, axes, metric, width - 0.1)
    _legend(study, figure)
    return Picture(figure, COLUMNS, records)


def _legend(study: Study, figure: Figure) -> None:
    height = figure.get_figheight()
    example = style.MARKS["mooncake_both"].color
    if _noop_tax(study, "ttft_p90") is None:
        row = study.taxes_at("ref_safe", "ttft_p90").get(NOOP)
        words = [f"not split into framework and implementation: no-op {bars.state_text(row)}"]
        handles = []
    else:
        words = []
        handles = [
            Patch(color=style.MARKS[NOOP].color, label="framework (no-op)"),
            Patch(color=example, label="implementation, or callbacks"),
        ]
    handles.append(Patch(facecolor="white", edgecolor=example, lw=0.6, label="not in callbacks"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.38 / height), ncols=3,
        frameon=False, fontsize=5.5, handlelength=1.2, columnspacing=0.9, borderaxespad=0.1,
    )  # fmt: skip
    words += ["crossed: negative; dots: single blocks", bars.aa_text(study)]
    text = "\n".join(style.fitted(line, style.COLUMN_IN - 0.12, 5) for line in words)
    figure.text(0.06 / style.COLUMN_IN, 0.19 / height, text, fontsize=5, va="bottom")
