"""Figure 9: every tax at ref_safe with its interval and verdict, beside prior, A/A band and margin.

The headline of the study in one picture: what was measured, how sure, and what was expected.
"""

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.names import PLAIN
from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.marks import Mark

TITLE = "Figure 9: taxes at ref_safe with intervals and verdicts"
CAPTION = (
    "Every tax at ref_safe with its 95 % interval and verdict, over the A/A band and the "
    "equivalence margin fixed beforehand. A study of one block has no intervals: one launch, "
    "launches not included. An open triangle marks a tax from a cell in which a server was "
    "saturated or dropped arrivals: it gets no verdict. Open diamonds are the prior: the trace "
    "replay on eight coupled, saturated instances that this study sets out to check."
)
ROW_IN = 0.145
TEXT_IN = 1.02
NO_VERDICT = "point estimate, no verdict"
MARKED = "no verdict (marked)"


def priors(study: StudyTables) -> dict[str, float]:
    """The TTFT p90 taxes of the earlier trace replay (8 instances, saturated), by configuration."""
    values = study.settings["hypotheses"]["prior"]
    plain = values["plain_ttft_p90_s"]
    return {
        "mooncake_both": values["mooncake_both_ttft_p90_s"] / plain - 1,
        "nixl_both": values["nixl_ttft_p90_s"] / plain - 1,
    }


def interval_text(row: TaxRow) -> str:
    """'+31 [27, 35]', in per cent; without an interval the number alone."""
    if row.tax is None:
        return ""
    if row.tax_lo is None or row.tax_hi is None:
        return style.percent(row.tax)
    # Decimals beside so wide an interval would say nothing, and do not fit.
    like = row.tax if max(abs(row.tax_lo), abs(row.tax_hi)) < 0.4 else 1.0
    value, low, high = (style.percent(v, like) for v in (row.tax, row.tax_lo, row.tax_hi))
    return f"{value} [{low.removeprefix('+')}, {high.removeprefix('+')}]"


def verdict_text(row: TaxRow, aa: str | None) -> str:
    """The verdict in a word; the A/A row, a marked one and a one-block study have none."""
    if row.config == aa:
        return "A/A"
    words = {"INCONCLUSIVE": "inconcl.", NO_VERDICT: "", MARKED: "marked"}
    return words.get(row.verdict, row.verdict)


def _row(axes: Axes, index: int, row: TaxRow, mark: Mark, width_in: float, verdict: str) -> None:
    bars.interval(axes, index, row, mark.color)
    axes.plot(
        row.tax or 0.0, index, mark.marker, color=mark.color, ms=4, zorder=6, markeredgewidth=0.7,
        markerfacecolor=mark.color if mark.filled else "white",
    )  # fmt: skip
    if row.mark:
        bars.overload_mark(axes, row.tax or 0.0, index)
    for inches, text, align in (
        (0.04, interval_text(row), "left"), (TEXT_IN, verdict, "right")
    ):  # fmt: skip
        axes.text(
            1 + inches / width_in, index, text, ha=align, va="center_baseline", fontsize=5,
            transform=axes.get_yaxis_transform(), fontweight="bold" if text == "TAX" else "normal",
        )  # fmt: skip


def _panel(study: StudyTables, axes: Axes, metric: str, width_in: float) -> list[dict[str, object]]:
    marks = style.marks(study)
    margin = study.settings["statistics"]["margins"][metric]
    taxes = study.taxes_at("ref_safe", metric)
    prior = priors(study) if metric == "ttft_p90" else {}
    band = bars.aa_interval(study, "ref_safe", metric)
    shown = [item for item in study.launched if item.id != PLAIN]
    drawn = [value for row in taxes.values() for value in bars.numbers(row)]
    bars.tax_axis(axes, [*drawn, *prior.values(), -margin, margin], room=0.05)
    bars.aa_band(axes, band)
    for end in (-margin, margin):
        axes.axvline(end, color="#7c6a3c", lw=0.6, linestyle=(0, (1, 1.5)), zorder=0.8)
    records = []
    for index, item in enumerate(shown):
        row = taxes.get(item.id)
        record = bars.tax_record(row, item.id, metric, "ref_safe")
        record["prior_tax"] = prior.get(item.id)
        record["margin"] = margin
        if band:
            record["aa_lo"], record["aa_hi"] = band
        records.append(record)
        if row is None or row.status != "valid" or row.tax is None:
            bars.no_number(axes, index, 0.8, row, width_in)
            continue
        if item.id in prior:
            axes.plot(prior[item.id], index, "D", ms=4, mfc="white", mec="black", mew=0.6, zorder=5)
        _row(axes, index, row, marks[item.id], width_in, verdict_text(row, study.aa))
    bars.row_labels(axes, [item.label for item in shown], 1.2)
    rate = study.reference["ref_safe"]
    judged = [row for row in taxes.values() if row.config != study.aa and row.tax is not None]
    bare = bool(judged) and all(row.verdict in (NO_VERDICT, MARKED) for row in judged)
    axes.set_title(
        f"{bars.METRIC_LABELS[metric]} at ref_safe ({rate:g} req/s)"
        f"{': point estimates, no verdicts' if bare else ''}",
        loc="left", x=(0.08 - axes.get_position().x0 * style.COLUMN_IN) / width_in,
    )  # fmt: skip
    return records


def draw(study: StudyTables) -> Picture:
    """A forest plot per metric, with the numbers, their intervals and verdicts written out."""
    absent = bars.no_reference(study, TITLE)
    if absent:
        return absent
    metrics = list(bars.METRIC_LABELS)
    shown = [item for item in study.launched if item.id != PLAIN]
    panel = ROW_IN * len(shown)
    left = 0.15 + style.label_margin_in([item.label for item in shown], 6)
    width = style.COLUMN_IN - left - TEXT_IN - 0.08
    rows = [row for metric in metrics for row in study.taxes_at("ref_safe", metric).values()]
    figure = style.new_figure(study, style.COLUMN_IN, 2 * panel + 1.6, bars.sample_note(rows))
    records = []
    for position, metric in enumerate(metrics):
        bottom = 0.9 + (1 - position) * (panel + 0.5)
        axes = style.axes_in(figure, left, bottom, width, panel)
        records += _panel(study, axes, metric, width)
    band = bars.aa_interval(study, "ref_safe", "ttft_p90")
    margins = sorted({100 * study.settings["statistics"]["margins"][m] for m in metrics})
    handles: list[Artist] = [
            Line2D([], [], marker="D", ls="none", ms=4, mfc="white", mec="black", mew=0.6,
                   label="prior (trace replay)"),
            Patch(facecolor=style.BAND, label="A/A band" if band else "no A/A band"),
            Line2D([], [], color="#7c6a3c", lw=0.6, ls=(0, (1, 1.5)),
                   label=f"±{' or '.join(f'{m:g}' for m in margins)} % margin"),
    ]  # fmt: skip
    if bars.marked(rows):
        handles.append(bars.overload_handle())
    height, columns = figure.get_figheight(), 2 if len(handles) > 3 else 3
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.27 / height), ncols=columns,
        frameon=False, fontsize=5.5, handlelength=1.4, columnspacing=1.2, borderaxespad=0.1,
    )  # fmt: skip
    note = f"{bars.interval_text(rows)}; {bars.family_text(rows)}"
    figure.text(0.06 / style.COLUMN_IN, 0.19 / height, note, fontsize=5, va="bottom")
    return Picture(figure, (*bars.TAX_COLUMNS, "prior_tax", "margin"), records)
