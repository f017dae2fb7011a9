"""Figure 5: the TTFT p90 tax by input and output length, one heat map per configuration (Phase B).

Page width: nine numbers per configuration do not fit a column. The last map is the A/A comparison,
on the same scale: what the colours of the others are worth.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from connector_tax.artifacts.names import PLAIN
from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import bars, style
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 5: TTFT p90 tax by input and output length"
CAPTION = (
    "Tax on TTFT p90 by input and output length at ref_safe (Phase B), one map per configuration "
    "on one diverging scale centred at zero; exploratory taxes. An open circle marks a cell whose "
    "interval includes zero; a study of one block has no intervals: one launch, launches not "
    "included. An open triangle marks a cell in which a server was saturated or dropped arrivals: "
    "it gets no verdict. The last map is the A/A comparison: what the colours of the others are "
    "worth."
)
METRIC = "ttft_p90"
COLUMNS = (
    "config", "cell", "input_tokens", "output_tokens", "rate_rps", "tax", "tax_lo", "tax_hi",
    "interval_includes_0", "aa_lo", "aa_hi", "n_config", "n_plain", "family", "mark",
    "status", "reason",
)  # fmt: skip
PER_ROW = 4
BOLD = 1.13  # bold type is this much wider than the type that is measured
COLORMAP = "RdBu_r"


def includes_zero(row: TaxRow) -> bool | None:
    """Whether the interval of a tax includes 0; None where there is no interval."""
    if row.tax_lo is None or row.tax_hi is None:
        return None
    return row.tax_lo <= 0 <= row.tax_hi


def _missing(study: StudyTables, config: str, shape: tuple[int, int]) -> dict[str, object]:
    record: dict[str, object] = dict.fromkeys(COLUMNS)
    return record | {
        "config": config, "cell": f"{shape[0]}x{shape[1]}", "input_tokens": shape[0],
        "output_tokens": shape[1], "status": "missing", "reason": study.skip_reason(config) or "",
    }  # fmt: skip


def _record(row: TaxRow) -> dict[str, object]:
    record: dict[str, object] = {name: getattr(row, name, None) for name in COLUMNS}
    if row.status != "valid":
        return record | dict.fromkeys(("tax", "tax_lo", "tax_hi"))
    return record | {"interval_includes_0": includes_zero(row)}


def _cell(axes: Axes, at: tuple[int, int], row: TaxRow | None, scale: Normalize) -> None:
    from matplotlib import colormaps

    column, line = at
    if row is None or row.status != "valid" or row.tax is None:
        style.hatched(axes, column - 0.5, line - 0.5, 1, 1)
        axes.text(
            column, line, row.status if row else "missing", ha="center", va="center", fontsize=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
        return
    color = colormaps[COLORMAP](scale(row.tax))
    axes.add_patch(Rectangle((column - 0.5, line - 0.5), 1, 1, facecolor=color, edgecolor="white"))
    luminance = float(np.dot(color[:3], (0.299, 0.587, 0.114)))
    ink = "white" if luminance < 0.5 else "black"
    axes.text(column, line, style.percent(row.tax), ha="center", va="center", fontsize=6, color=ink)
    if includes_zero(row):
        axes.plot(column + 0.36, line - 0.32, "o", ms=2.6, mfc="none", mec=ink, mew=0.6)
    if row.mark:
        axes.plot(
            column - 0.36, line - 0.32, bars.OVERLOAD_MARKER, ms=3, mfc="none", mec=ink, mew=0.6
        )


def _map(
    axes: Axes, rows: dict[tuple[int, int], TaxRow], inputs: list[int], outputs: list[int],
    scale: Normalize,
) -> None:  # fmt: skip
    axes.set_xlim(-0.5, len(outputs) - 0.5)
    axes.set_ylim(-0.5, len(inputs) - 0.5)
    axes.set_xticks(range(len(outputs)), [str(value) for value in outputs])
    axes.set_yticks(range(len(inputs)), [str(value) for value in inputs])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for line, input_tokens in enumerate(inputs):
        for column, output_tokens in enumerate(outputs):
            _cell(axes, (column, line), rows.get((input_tokens, output_tokens)), scale)


def _scale_bar(figure: Figure, scale: Normalize, bottom_in: float) -> None:
    limit = float(scale.vmax or 1.0)
    axes = style.axes_in(figure, style.PAGE_IN - 2.3, bottom_in, 2.1, 0.09)
    ramp = np.linspace(-limit, limit, 129)[None, :]
    axes.imshow(ramp, aspect="auto", cmap=COLORMAP, norm=scale, extent=(-limit, limit, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([-limit, 0, limit], [style.percent(-limit), "0", style.percent(limit)])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(
        -0.02, 0.5, "TTFT p90 tax over plain (%)", ha="right", va="center", fontsize=6,
        transform=axes.transAxes,
    )  # fmt: skip


def draw(study: StudyTables) -> Picture:
    """Heat maps on one diverging scale centred at 0; an open circle marks intervals with 0."""
    shown = [item for item in study.launched if item.id != PLAIN]
    rows = [row for row in study.taxes if row.phase == "B" and row.metric == METRIC]
    if not rows:
        return style.absent(study, TITLE, "the study has no Phase B, the sweep over shapes.")
    inputs = sorted({row.input_tokens for row in rows})
    outputs = sorted({row.output_tokens for row in rows})
    by_config: dict[str, dict[tuple[int, int], TaxRow]] = {item.id: {} for item in shown}
    for row in rows:
        if row.config in by_config:
            by_config[row.config][row.input_tokens, row.output_tokens] = row
    values = [abs(row.tax) for row in rows if row.status == "valid" and row.tax is not None]
    limit = max([0.01, *values])
    scale = Normalize(-limit, limit)

    lines = math.ceil(len(shown) / PER_ROW)
    cell_height = min(0.3, 0.9 / len(inputs))
    height = cell_height * len(inputs)
    figure = style.new_figure(
        study, style.PAGE_IN, lines * (height + 0.36) + 0.82, bars.sample_note(rows)
    )
    left, gap = 0.62, 0.42
    width = (style.PAGE_IN - left - 0.1 - (PER_ROW - 1) * gap) / PER_ROW
    records: list[dict[str, object]] = []
    for index, item in enumerate(shown):
        line, column = divmod(index, PER_ROW)
        bottom = 0.76 + (lines - 1 - line) * (height + 0.36) + 0.1
        axes = style.axes_in(figure, left + column * (width + gap), bottom, width, height)
        _map(axes, by_config[item.id], inputs, outputs, scale)
        title = "A/A: plain again" if item.id == study.aa else item.label
        axes.set_title(style.fitted(title, width, BOLD * 6.5), loc="left")
        if column == 0:
            axes.set_ylabel("input tokens")
        if index + PER_ROW >= len(shown):
            axes.set_xlabel("output tokens")
        for shape in ((i, o) for i in inputs for o in outputs):
            row_here = by_config[item.id].get(shape)
            records.append(_record(row_here) if row_here else _missing(study, item.id, shape))
    _scale_bar(figure, scale, 0.32)
    figure.text(
        0.06 / style.PAGE_IN, 0.19 / figure.get_figheight(),
        f"{_overload_note(rows)}{_circle_note(rows)}; hatched: no number\n"
        f"{bars.family_text(rows)} at ref_safe, {study.reference['ref_safe']:g} req/s. "
        f"{_aa_note(by_config.get(study.aa or '', {}))}",
        fontsize=5.5, va="bottom", linespacing=1.3,
    )  # fmt: skip
    return Picture(figure, COLUMNS, records)


def _circle_note(rows: list[TaxRow]) -> str:
    known = any(row.tax_lo is not None for row in rows)
    return "○ 95 % interval includes 0" if known else bars.interval_text(rows)


def _overload_note(rows: list[TaxRow]) -> str:
    return "▽ saturated or dropped arrivals: no verdict\n" if bars.marked(rows) else ""


def _aa_note(rows: dict[tuple[int, int], TaxRow]) -> str:
    """The width of the A/A comparison over the shapes, as text."""
    taxes = [row.tax for row in rows.values() if row.status == "valid" and row.tax is not None]
    if not taxes:
        return "No A/A comparison."
    return f"A/A: {style.percent(min(taxes))} to {style.percent(max(taxes))} %."
