"""Draw figures 4, 5, 8 and 9: taxes with their intervals over the A/A band."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from connector_tax.artifacts.metrics import LATENCY_METRICS, judged_metrics, margin_of
from connector_tax.artifacts.names import ALL_RATES, PLAIN, REFERENCES
from connector_tax.artifacts.study_records import Reference
from connector_tax.artifacts.tables import GAP, TAX, WAIT, EffectRow
from connector_tax.artifacts.verdicts import TOO_FEW, costs, in_words
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records
from connector_tax.text import signed, size


def _panels(
    grid: np.ndarray, table: pd.DataFrame, labels: Sequence[str], ends: Sequence[float],
    at: str = "", logarithmic: bool = False,
) -> Iterator[tuple[Axes, pd.DataFrame]]:  # fmt: skip
    """Yield a panel for each metric with its rows, on a common scale that includes `ends`, with A/A
    bands.
    """
    for axes, (metric, panel) in zip(grid, table.groupby("metric", sort=False), strict=True):
        rows.tax_scale(axes, ends, logarithmic=logarithmic)
        rows.shade(axes, panel)
        rows.prepare(axes, labels, LATENCY_METRICS[str(metric)].label + at)
        yield axes, panel


# ---- figure 4: the gap between the reference rates shows what queueing adds near saturation

BARS_IN = 0.24
HATCH = "//////"
GAP_ENDS = ["gap", "gap_lo", "gap_hi"]


def bars(study: StudyTables) -> Figure:
    """Draw bars of each tax with its interval over the A/A band, in one panel per metric."""
    rows.need_ref_safe(study)
    rates = study.reference
    one_rate = rates["ref_load"] == rates["ref_safe"]
    references: list[Reference] = ["ref_safe"] if one_rate else list(REFERENCES)
    keys = ["config", "metric"]
    named = dict(zip(("estimate", "lo", "hi"), GAP_ENDS, strict=True))
    gaps = frame(study.of(GAP), EffectRow).rename(columns=named)[[*keys, *GAP_ENDS]]
    table = rows.taxes(study, [item.id for item in study.connectors], references)
    table = table.merge(gaps, how="left", on=keys)
    notes = [f"{rows.tax_text(table)}; {rows.aa_text(study)}"]
    height = 2 * (BARS_IN * len(study.connectors) + 0.25) + 0.75
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    grid = figure.subplots(2, sharex=True)
    labels = [item.label for item in study.connectors]
    for axes, panel in _panels(grid, table, labels, rows.numbers(table)):
        _bars(study, axes, panel, references)
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    names = [f"{name}, {rates[name]:g} req/s" for name in references]
    if one_rate:
        names = [f"ref_safe = ref_load, {rates['ref_safe']:g} req/s"]
    handles: list[Artist] = [
        Patch(edgecolor="#606060", lw=0.6, label=name, facecolor=fill, hatch=hatch)
        for name, (fill, hatch) in zip(names, (("#606060", None), ("white", HATCH)), strict=False)
    ]
    handles += [rows.band_handle(table), *rows.overload_handles(table)]
    return style.laid_out(figure, handles, 2)


def _bars(study: StudyTables, axes: Axes, panel: pd.DataFrame, references: Sequence[str]) -> None:
    height = 0.8 / len(references)
    for number, row in enumerate(records(panel)):
        place, line = divmod(number, len(study.connectors))
        y = line + (place - (len(references) - 1) / 2) * height
        if rows.value(axes, y, row, height=0.9 * height):
            color, filled = style.marks(study)[row["config"]].color, place == 0
            axes.barh(
                y, row["tax"], height=0.9 * height, zorder=3, lw=0.6, edgecolor=color,
                color=color if filled else "white", hatch=None if filled else HATCH,
            )  # fmt: skip
        if place == len(references) - 1 and row["gap"] is not None:
            rows.beside(axes, line, rows.size_text(row, GAP_ENDS))
    if panel["gap"].notna().any():
        rows.beside(axes, -0.75, "gap, pp")


# ---- figure 5: the last map is the A/A comparison, which shows the noise of the others' colours

ACROSS = 2
CELL_IN = 0.22
MAP_IN = 1.05  # the least width of a map
CIRCLE, TRIANGLE = "○", "▽"


def heat_maps(study: StudyTables) -> Figure:
    """Draw heat maps on one diverging scale; a circle marks intervals that include 0."""
    table = _by_shape(study)
    if table.empty:
        raise style.AbsentError("the study has no Phase B, the sweep over shapes.")
    shown = list(table["config"].unique())
    inputs = sorted(table["input_tokens"].unique(), reverse=True)
    outputs = sorted(table["output_tokens"].unique())
    margin = margin_of(study.settings["statistics"]["margins"], "ttft_p90")
    widest = max(style.text_width_in(words, style.TEXT_PT) for words in table["words"])
    cell_in = CELL_IN
    if widest > MAP_IN / len(outputs):
        # Marks go on a separate line.
        table["words"] = table["words"].str.replace(" ", "\n")
        cell_in = 1.2 * CELL_IN
    limit = max([3 * margin, *map(abs, rows.numbers(table, ["tax"]))])
    colors = _colors(margin / limit)
    lines = math.ceil(len(shown) / ACROSS)
    height = lines * (cell_in * len(inputs) + 0.42) + 0.3
    figure = style.new_figure(study, style.COLUMN_IN, height, _notes(study, table, margin))
    grid = style.panels(figure, len(shown), ACROSS, share_x=True)
    for axes, config in zip(grid.flat, shown, strict=False):
        config_rows = table[table["config"] == config]
        taxes, words = (
            config_rows.pivot_table(name, "input_tokens", "output_tokens", "first").reindex(
                index=inputs, columns=outputs
            )
            for name in ("tax", "words")
        )
        style.heat_map(axes, taxes, words, cmap=colors, vmin=-limit, vmax=limit)
        label = study.against("A/A: plain again") if config == study.aa else study.label(config)
        axes.set_title(style.in_two_lines(label, 1.3, style.TEXT_PT * 1.13))
    for axes in grid[:, 0]:
        axes.set_ylabel("input tokens")
    for axes in grid[-1, :]:
        axes.set_xlabel("output tokens")
    scale = ScalarMappable(Normalize(-limit, limit), colors)
    bar = figure.colorbar(scale, ax=grid, aspect=30, pad=0.01)
    bar.set_ticks([-limit, 0, limit], labels=[size(-100 * limit), "0", size(100 * limit)])
    bar.set_label("TTFT p90 tax (%)")
    bar.outline.set_visible(False)
    return style.laid_out(figure)


def _colors(margin: float) -> ListedColormap:
    """Return colours: red above zero, blue below, grey within the margin (a share of the scale's
    end).
    """
    ends = np.linspace(-1, 1, 512)
    colors = colormaps["RdBu_r"]((1 + ends) / 2)
    colors[abs(ends) <= margin] = to_rgba("#d9d9d9")
    return ListedColormap(colors)


def _by_shape(study: StudyTables) -> pd.DataFrame:
    """Return each configuration's tax for each shape, with the text of its cell."""
    table = rows.measured(study, "B").query("metric == 'ttft_p90'")
    columns = ["cell", "input_tokens", "output_tokens"]
    shapes = pd.DataFrame(study.document["cells"]["B"], columns=columns)
    table = table.merge(shapes, how="left", on="cell")
    order = {item.id: place for place, item in enumerate(study.compared)}
    table = table[table["config"].isin(order)].assign(order=table["config"].map(order))
    table = table.sort_values(["order", "input_tokens", "output_tokens"])
    low, high = (table[end].astype(float) for end in rows.ENDS[1:])
    within = ((low <= 0) & (high >= 0)).astype(object).where(low.notna() & high.notna())
    table = table.assign(interval_includes_0=within)
    return table.assign(words=[_cell_text(row) for row in records(table)])


def _cell_text(row: dict[Any, Any]) -> str:
    """Return a tax in per cent with its marks, or why there is no tax."""
    if row["tax"] is None:
        return str(row["status"])
    marks = CIRCLE * bool(row["interval_includes_0"]) + TRIANGLE * bool(row["mark"])
    return " ".join(filter(None, (size(100 * row["tax"]), marks)))


def _notes(study: StudyTables, table: pd.DataFrame, margin: float) -> list[str]:
    circle = f"{CIRCLE} interval includes 0" * bool(rows.numbers(table, ["tax_lo"]))
    marked = f"{TRIANGLE} marked: no verdict" * bool(rows.overload_handles(table))
    noise = rows.numbers(table[table["config"] == study.aa], ["tax"])
    aa = "no A/A comparison" * (not noise)
    grey, rate = f"grey: within ±{100 * margin:g} %", f"{study.reference['ref_safe']:g} req/s"
    return ["; ".join(filter(None, (grey, circle, marked, rows.tax_text(table), rate, aa)))]


def other_waits(study: StudyTables) -> str:
    """Return text on cells where requests wait longer or shorter for their prompt's step than
    plain's.

    Fixed arrivals alone can cause such a difference (docs/decisions.md); with other arrivals longer
    steps may. Lists configurations and cells of Phase B whose interval excludes zero and whose
    difference exceeds the margin of TTFT; "" if there are none.
    """
    margin = margin_of(study.settings["statistics"]["margins"], "ttft_p50")
    ttft = {(r.config, r.cell): r.base for r in study.of(TAX, "B") if r.metric == "ttft_p50"}
    cells_by_label: dict[str, list[str]] = {}
    for row in study.of(WAIT, "B"):
        base = ttft.get((row.config, row.cell))
        if row.config == study.aa or base is None or row.lo is None or row.hi is None:
            continue
        if not row.lo <= 0 <= row.hi and row.estimate and abs(row.estimate) > margin * base:
            difference = f"{signed(row.estimate, 2)} ms at {row.cell}"
            cells_by_label.setdefault(study.label(row.config), []).append(difference)
    if not cells_by_label:
        return ""
    listed = "; ".join(f"{label} {', '.join(cells)}" for label, cells in cells_by_label.items())
    fixed = study.settings["arrivals"]["process"] == "fixed"
    cause = " (due to arrivals, not the connector)" if fixed else ""
    return f"Waits for the step with the prompt differ{cause}: {listed}"


# ---- figure 8: is the stacked connector's tax the sum of its parts' taxes (H4)?

PARTS = ("mooncake_both", "lmcache_only")
STACKED = "multi_mooncake_lmcache"
SUM = "sum of the two"
SUM_IN = 0.22
TOLERANCE = ["tolerance_lo", "tolerance_hi"]
DOTTED: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": (0, (1, 1.2)), "zorder": 4.5}


def additivity(study: StudyTables) -> Figure:
    """Draw bars of both parts, their sum with its interval, and the stack, over the A/A band."""
    rows.need_ref_safe(study)
    labels = {item.id: item.label for item in study.configurations} | {SUM: SUM}
    shown = (*PARTS, SUM, STACKED)
    missing = [config for config in shown if config not in labels]
    if missing:
        raise style.AbsentError(f"not in this study: {', '.join(missing)}.")
    tolerance = study.settings["hypotheses"]["h4_tolerance"]
    table = rows.taxes(study, shown)
    measured = table[table["config"] != SUM]
    table = _with_sums(table, tolerance)
    notes = [
        f"dotted: ±{100 * tolerance:g} % of the stack's tax",
        rows.tax_text(measured),
    ]
    figure = style.new_figure(study, style.COLUMN_IN, 2 * (4 * SUM_IN + 0.4) + 0.2, notes)
    grid = figure.subplots(2, sharex=True)
    ends = rows.numbers(table, [*rows.ENDS, *TOLERANCE])
    for axes, panel in _panels(grid, table, [labels[config] for config in shown], ends):
        _parts(study, axes, panel)
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    return style.laid_out(figure, rows.overload_handles(measured))


def _with_sums(taxes: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return the taxes with rows of the sums filled in, if both parts have a tax.

    A sum's ends are the sums of its parts' ends. This is conservative: it holds for any dependence
    of the two taxes, which share plain's launches.
    """
    filled = [row | dict.fromkeys(TOLERANCE) for row in records(taxes)]
    for start in range(0, len(filled), 4):
        one, other, total, whole = filled[start : start + 4]
        if one["tax"] is None or other["tax"] is None:
            total["reason"] = "a part has no valid tax"
            continue
        total |= {"status": "valid", "mark": "; ".join(filter(None, (one["mark"], other["mark"])))}
        for end in rows.ENDS:
            known = one[end] is not None and other[end] is not None
            total[end] = one[end] + other[end] if known else None
        if whole["tax"] is not None:
            ends = sorted(factor * whole["tax"] for factor in (1 - tolerance, 1 + tolerance))
            total |= dict(zip(TOLERANCE, ends, strict=True))
    return pd.DataFrame(filled, dtype=object)


def _parts(study: StudyTables, axes: Axes, panel: pd.DataFrame) -> None:
    """Draw a bar per row with its interval; the sum's bar joins its parts, between dotted ends."""
    marks, bars = style.marks(study), records(panel)
    for y, row in enumerate(bars):
        if not rows.value(axes, y, row, height=0.75):
            continue
        start = 0.0
        for part in bars[:2] if row["config"] == SUM else [row]:
            color = marks[part["config"]].color
            axes.barh(y, part["tax"], left=start, height=0.7, color=color, zorder=3, lw=0)
            start += part["tax"]
        rows.beside(axes, y, rows.size_text(row))
        for end in (row[name] for name in TOLERANCE if row[name] is not None):
            axes.plot([end, end], [y - 0.45, y + 0.45], **DOTTED)


# ---- figure 9: measured taxes, their intervals, and the prior

FOREST_IN = 0.28
MARGIN: dict[str, Any] = {"color": "#7c6a3c", "lw": 0.8, "ls": (0, (1, 1.5))}
PRIOR: dict[str, Any] = rows.OVERLOAD | {"marker": "D", "ms": 4}


def priors(study: StudyTables) -> dict[str, float]:
    """Return the TTFT p90 taxes over plain of the earlier trace replay (8 instances, saturated), by
    id; empty in a study with another baseline.
    """
    if study.baseline != PLAIN:
        return {}
    values = study.settings["hypotheses"]["prior"]
    plain = values["plain_ttft_p90_s"]
    return {
        "mooncake_both": values["mooncake_both_ttft_p90_s"] / plain - 1,
        "nixl_both": values["nixl_ttft_p90_s"] / plain - 1,
    }


def forest(study: StudyTables) -> Figure:
    """Draw a forest plot per metric, with numbers, intervals and verdicts as text.

    A comparison of commands has its judged latencies over all rates, a study the headline metrics
    at ref_safe.
    """
    rows.need_ref_safe(study)
    metrics, reference, at = [*rows.METRICS], "ref_safe", " at ref_safe"
    rates = f"{study.reference['ref_safe']:g} req/s"
    if "commands" in study.settings["engine"]:
        judged = [m for m in judged_metrics(study.settings["statistics"]) if m in LATENCY_METRICS]
        metrics, reference, at = judged or metrics, ALL_RATES, ""
        judged_rates = study.judged_rates or study.settings["phase_a"]["rates_rps"]
        rates = ", ".join(f"{rate:g}" for rate in judged_rates) + " req/s"
    table = rows.taxes(study, [item.id for item in study.compared], (reference,), metrics)
    expected = table["metric"] == "ttft_p90"
    table["prior_tax"] = table["config"].map(priors(study)).where(expected)
    table["margin"] = [
        margin_of(study.settings["statistics"]["margins"], m) for m in table["metric"]
    ]
    notes = [f"{rows.tax_text(table)}; {rates}"]
    height = len(metrics) * (FOREST_IN * len(study.compared) + 0.25) + 0.5
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    grid = figure.subplots(len(metrics), sharex=True, squeeze=False).ravel()
    widest = table["margin"].max()
    ends = [*rows.numbers(table, [*rows.ENDS, "prior_tax"]), -widest, widest]
    labels = [item.label for item in study.compared]
    for axes, panel in _panels(grid, table, labels, ends, at, logarithmic=True):
        _forest(study, axes, panel)
    grid[-1].set_xlabel(rows.tax_label(study, grid[-1]))
    margins = " or ".join(f"{100 * margin:g}" for margin in sorted(table["margin"].unique()))
    prior = [Line2D([], [], label="prior (trace replay)", **PRIOR)]
    handles = [
        *(prior if table["prior_tax"].notna().any() else []),
        rows.band_handle(table),
        Line2D([], [], label=f"±{margins} % margin", **MARGIN),
        *rows.overload_handles(table),
    ]
    return style.laid_out(figure, handles, 2)


def _forest(study: StudyTables, axes: Axes, panel: pd.DataFrame) -> None:
    margin = panel["margin"].iloc[0]
    for end in (-margin, margin):
        axes.axvline(end, zorder=0.8, **MARGIN)
    for y, row in enumerate(records(panel)):
        if not rows.value(axes, y, row, mark=style.marks(study)[row["config"]]):
            continue
        if row["prior_tax"] is not None:
            axes.plot(row["prior_tax"], y, zorder=5, **PRIOR)
        untold = row["config"] == study.aa or row["verdict"] == TOO_FEW
        verdict_words = "" if untold else in_words(row["verdict"], row["margin"])
        rows.beside(axes, y - 0.22 * bool(verdict_words), rows.size_text(row))
        rows.beside(axes, y + 0.22, verdict_words, bold=costs(row["verdict"]))
