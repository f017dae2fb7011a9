"""Draw figures 1 to 3: latencies, their taxes and throughput over the offered rate of Phase A."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from connector_tax.artifacts.metrics import CRITERIA, criteria_of
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.paths import CELLS
from connector_tax.artifacts.tables import POOLED, ROW_TYPES
from connector_tax.figures import rows, style
from connector_tax.figures.tables import StudyTables, frame, records
from connector_tax.marks import Mark

COLUMNS = [
    "config", "rate_rps", "value", "lo", "hi", "status", "reason", "blocks_lost",
    "saturation_criteria", "knee_rps",
]  # fmt: skip
# Strokes over a saturated point, one for each criterion that fired.
STROKES = dict(zip(CRITERIA, itertools.cycle("x_|+1234"), strict=False))
SPREAD = 0.18  # share of the distance between neighbouring rates, for all configurations together
PANEL_IN = 1.55
PLOTS_IN = [1.1, 0.9]  # of Figure 3: throughput, its ratio
ROW_IN, AXES_IN = 0.17, 1.0  # a configuration's row; title, ticks and labels
CELLS_IN = 1.7  # all cells of a row
KEPT = "#d8dde3"
KNEE: dict[str, Any] = {"fill": False, "ec": "black", "lw": 1.2, "zorder": 7, "clip_on": False}
STROKE: dict[str, Any] = {"ls": "none", "color": "black", "ms": 6, "mew": 0.7, "zorder": 4}


def grid_rates(study: StudyTables) -> list[float]:
    """Return the offered rates of Phase A in ascending order, requests/s."""
    return sorted({float(rate) for rate in study.settings["phase_a"]["rates_rps"]})


def _step(rates: Sequence[float]) -> float:
    """Return the smallest ratio between neighbouring rates."""
    return min((b / a for a, b in itertools.pairwise(rates)), default=2.0)


def rate_ticks(axes: Axes, which: str, rates: Sequence[float], apart: float) -> None:
    """Scale an axis logarithmically with a tick for each rate.

    A tick has no label if the next one is nearer than `apart`, a share of the axis.
    """
    near = (rates[-1] / rates[0]) ** apart
    after = [*rates[1:], math.inf]
    labels = [f"{r:.10g}" if b >= near * r else "" for r, b in zip(rates, after, strict=True)]
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axes.set(**{f"{which}ticks": rates, f"{which}ticklabels": labels})
    (axes.xaxis if which == "x" else axes.yaxis).minorticks_off()


def rate_axis(axes: Axes, study: StudyTables, named: bool = False, apart: float = 0.0) -> None:
    """Draw the offered rates along the x axis, with lines at the reference rates.

    Args:
        named: whether to write the names of the reference rates above their lines.
        apart: as in `rate_ticks`.
    """
    rates = grid_rates(study)
    rate_ticks(axes, "x", rates, apart)
    axes.set_xlim(rates[0] / _step(rates) ** 0.55, rates[-1] * _step(rates) ** 0.55)
    lines = {study.reference[name]: name for name in reversed(REFERENCES)}
    for rate, name in lines.items():
        dashes = "-" if name == "ref_safe" else (0, (3, 2))
        axes.axvline(rate, color="#9aa7b5", ls=dashes, lw=0.8, zorder=0.5)
        if not named:
            continue
        words = "ref_safe = ref_load" if len(lines) == 1 else name
        last = rate == max(lines)
        side = "center" if len(lines) == 1 else "left" if last else "right"
        axes.annotate(
            words, (rate, 1), xycoords=axes.get_xaxis_transform(), xytext=(-3 if last else 3, 2),
            textcoords="offset points", ha=side, color="#4f6073",
        )  # fmt: skip


def curve(
    axes: Axes, study: StudyTables, table: pd.DataFrame, columns: Sequence[str], mark: Mark,
    share: float,
) -> pd.DataFrame:  # fmt: skip
    """Draw values over the rate with their intervals; the line breaks where a rate has no value.

    The table has a row for each rate; `columns` are the value and its interval's ends. Points are
    shifted by `share` (-0.5 to 0.5) of SPREAD of the step to the next rate. Returns the rows with a
    value, with their position in the column `x`.
    """
    rates = grid_rates(study)
    drawn = table.set_index("rate_rps").reindex(rates).reset_index()
    drawn["x"] = [rate * _step(rates) ** (SPREAD * share) for rate in rates]
    value, low, high = (drawn[name].astype(float) for name in columns)
    axes.plot(drawn["x"], value, ls=mark.line, zorder=3, **style.marker_style(mark))
    known = low.notna() & high.notna()
    axes.vlines(drawn["x"][known], low[known], high[known], color=mark.color, lw=0.8, zorder=2)
    return drawn[value.notna()]


def within(taxes: pd.DataFrame) -> tuple[float, float]:
    """Return the range of unmarked taxes and their intervals; of all taxes if all are marked."""
    clear = taxes[taxes["mark"] == ""]
    values = [0.0, *rows.numbers(taxes if clear.empty else clear)]
    return min(values), max(values)


def tax_curve(
    axes: Axes, study: StudyTables, taxes: pd.DataFrame, mark: Mark, share: float
) -> None:
    """Draw taxes over the rate: a triangle if a tax is marked, an arrow if it exceeds the axis."""
    low, high = axes.get_ylim()
    for row in records(curve(axes, study, taxes, rows.ENDS, mark, share)):
        if not low <= row["tax"] <= high:
            edge, marker = (high, "^") if row["tax"] > high else (low, "v")
            axes.plot(row["x"], edge, marker, color=mark.color, ms=3.6, zorder=6, clip_on=False)
        elif row["mark"]:
            axes.plot(row["x"], row["tax"], zorder=6, **rows.OVERLOAD)


def knee_text(study: StudyTables, config: str) -> str:
    """Return the configuration's saturation rate; '>32' if no rate of the grid saturates it."""
    cells = [cell for cell in study.pooled if cell.config == config]
    if not any(cell.status == "valid" for cell in cells):
        return "–"
    knee = study.reference["saturation_rate_rps"].get(config)
    saturated = [c.rate_rps for c in cells if c.saturated and c.rate_rps is not None]
    if knee is None and not saturated:
        return f">{max(cell.rate_rps or 0.0 for cell in cells):.10g}"
    return f"{min(saturated) if knee is None else knee:.10g}"


def cells(study: StudyTables, column: str) -> pd.DataFrame:
    """Return a column of cells.csv for every Phase A cell, by configuration.

    The ends of its interval, if any, have `_lo` and `_hi` before the unit.
    """
    table = frame(study.cell_rows, ROW_TYPES[CELLS]).query("phase == 'A'")
    not_valid = table[(table["block"] != POOLED) & (table["status"] != "valid")]
    # A block counts once, even if several of its baseline launches lack the cell.
    not_valid = not_valid.drop_duplicates(["configuration", "cell", "block"])
    counts = Counter(zip(not_valid["configuration"], not_valid["cell"], strict=True))
    stem, _, suffix = column.rpartition("_")
    names = {column: "value", f"{stem}_lo_{suffix}": "lo", f"{stem}_hi_{suffix}": "hi"}
    table = table[table["block"] == POOLED].rename(columns=names)
    at = zip(table["config"], table["cell"], strict=True)
    table["blocks_lost"] = [counts[key] for key in at]
    order = [item.id for item in study.configurations]
    table["knee_rps"] = table["config"].map({config: knee_text(study, config) for config in order})
    table["order"] = table["config"].map(order.index)
    table = table.sort_values(["order", "rate_rps"])
    return table.reindex(columns=COLUMNS)


def sample_text(study: StudyTables) -> str:
    """Return the number of requests behind a point, in words."""
    return rows.n_range(cell.n for cell in study.pooled)


def _knees(table: pd.DataFrame, study: StudyTables) -> str:
    """Return the saturation rates as text, each with the configurations that share it."""
    by_knee: dict[str, list[str]] = {}
    for config, config_rows in table.groupby("config", sort=False):
        by_knee.setdefault(str(config_rows["knee_rps"].iloc[0]), []).append(str(config))
    most = max(by_knee, key=lambda knee: len(by_knee[knee]))
    named = [
        f"{', '.join(map(study.label, configs))} {knee}"
        for knee, configs in by_knee.items()
        if knee != most
    ]
    return "; ".join([*named, f"{'others' if named else 'all'} {most}"])


def _strokes(table: pd.DataFrame) -> list[Artist]:
    """Return legend entries of the criteria that fired anywhere."""
    fired = set(";".join(table["saturation_criteria"].dropna()).split(";"))
    return [
        Line2D([], [], marker=stroke, label=f"saturated: {CRITERIA[criterion].label}", **STROKE)
        for criterion, stroke in STROKES.items()
        if criterion in fired
    ]


def latency_figure(study: StudyTables, metric: str) -> Figure:
    """Draw a latency against the rate, in ms in the upper panel, as a tax in the lower panel."""
    compared = rows.measured(study, "A").dropna(subset="rate_rps").query("metric == @metric")
    compared = compared[compared["config"].isin([item.id for item in study.compared])]
    table = cells(study, f"{metric}_ms")
    label = rows.METRICS[metric]
    knees = f"knee, req/s: {_knees(table, study)}"
    notes = [f"{knees}; {rows.interval_text(compared)}; {sample_text(study)}"]
    lines = math.ceil(len(study.launched) / 2)
    height = 2 * PANEL_IN + 0.55 + 0.13 * (lines + 1)
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    upper, lower = figure.subplots(2, sharex=True)
    rows.tax_scale(lower, within(compared), "y")
    # Side by side at each rate, so that no point hides another.
    shares = np.linspace(-0.5, 0.5, len(study.launched))
    for item, share in zip(study.launched, shares, strict=True):
        mark = style.marks(study)[item.id]
        config_rows = table[table["config"] == item.id]
        for point in records(curve(upper, study, config_rows, ["value", "lo", "hi"], mark, share)):
            for criterion in filter(None, point["saturation_criteria"].split(";")):
                upper.plot(point["x"], point["value"], STROKES[criterion], **STROKE)
        tax_curve(lower, study, compared[compared["config"] == item.id], mark, share)
    upper.set(ylabel=f"{label} (ms)")
    if table["value"].notna().any():
        upper.set(yscale="log")
        style.log_ticks(upper.yaxis, *upper.get_ylim())
    upper.grid(axis="y")
    rate_axis(upper, study, named=True)
    rate_axis(lower, study)
    lower.set(xlabel="offered rate (requests/s)", ylabel=rows.tax_label(study, lower, "y"))
    marked = rows.overload_handles(compared, "saturated, dropped: no verdict")
    handles = [*style.configuration_handles(study, study.launched), *_strokes(table), *marked]
    return style.laid_out(figure, handles, 2)


ttft = partial(latency_figure, metric="ttft_p90")
tpot = partial(latency_figure, metric="tpot_p90")


def throughput(study: StudyTables) -> Figure:
    """Draw throughput with the line y = x, its ratio to the arrivals, and fired criteria."""
    limits = study.settings["saturation"]
    kept = limits["throughput_ratio_min"]
    signs = (
        f"{c.label} {'>' if c.above else '<'} {limits[c.bound]:g}"
        for c in criteria_of(limits).values()
    )
    notes = [f"saturated: {', '.join(signs)}; hatched: no number", sample_text(study)]
    heights = [*PLOTS_IN, ROW_IN * len(study.configurations)]
    handles_in = style.LEGEND_IN * (len(study.configurations) + len(STROKES)) / 2
    height = sum(heights) + AXES_IN + handles_in
    figure = style.new_figure(study, style.COLUMN_IN, height, notes)
    upper, lower, criteria = figure.subplots(3, height_ratios=heights)
    table = cells(study, "effective_throughput_rps")
    drawn = table.assign(ratio=cells(study, "throughput_ratio")["value"])
    for item in study.configurations:
        mark, config_rows = style.marks(study)[item.id], drawn[drawn["config"] == item.id]
        for axes, column in ((upper, "value"), (lower, "ratio")):
            axes.plot(
                config_rows["rate_rps"], config_rows[column].astype(float), ls=mark.line, zorder=3,
                **style.marker_style(mark),
            )  # fmt: skip
    _limits(upper, lower, study, kept)
    _criteria(criteria, study, table)
    kept_up = Patch(color=KEPT, label=f"≥ {kept:g} of the arrivals")
    handles = [*style.configuration_handles(study), kept_up, *_strokes(table)]
    return style.laid_out(figure, handles, 2)


def _limits(upper: Axes, lower: Axes, study: StudyTables, kept: float) -> None:
    for axes in (upper, lower):
        rate_axis(axes, study, named=axes is upper, apart=0.1)
        axes.grid(axis="y")
    ends = upper.get_xlim()
    rate_ticks(upper, "y", grid_rates(study), apart=0.15)
    upper.plot(ends, ends, color="#7a7a7a", lw=0.6, zorder=1)
    upper.set(xlim=ends, ylabel="effective (requests/s)")
    upper.tick_params(labelbottom=False)
    lower.axhspan(kept, 1, color=KEPT, lw=0, zorder=0.6)
    lower.set(ylabel="effective / arrivals", xlabel="offered rate (requests/s)")
    lower.set_ylim(top=1.04)


def _criteria(axes: Axes, study: StudyTables, table: pd.DataFrame) -> None:
    """Draw a cell per configuration and rate, darker if more saturation criteria fired."""
    grid, order = grid_rates(study), [item.id for item in study.configurations]
    valid = table["status"] == "valid"
    fired = table["saturation_criteria"].map(lambda text: [c for c in text.split(";") if c])
    blocks_lost = table["blocks_lost"].map(lambda count: f"−{count}" if count else "")
    cell_words = blocks_lost.where(valid, table["status"])
    keyed = table.assign(fired=fired.map(len).where(valid), words=cell_words)
    counts, words = (
        keyed.pivot_table(name, "config", "rate_rps", "first").reindex(index=order, columns=grid)
        for name in ("fired", "words")
    )
    words = words.fillna("missing").map(lambda text: style.fitted(text, CELLS_IN / len(grid)))
    for line, item in enumerate(study.configurations):
        knee = knee_text(study, item.id)
        rows.beside(axes, line + 0.5, knee)
        config_rows = table[table["config"] == item.id]
        for place, rate in enumerate(grid):
            if f"{rate:.10g}" == knee:
                axes.add_patch(Rectangle((place, line), 1, 1, **KNEE))
            names = [
                name
                for at in fired[config_rows.index[config_rows["rate_rps"] == rate]]
                for name in at
            ]
            for x, name in zip(np.linspace(0, 1, len(names) + 2)[1:], names, strict=False):
                axes.plot(place + x, line + 0.5, STROKES[name], **STROKE)
        states = records(config_rows[["status", "reason"]].drop_duplicates())
        if len(config_rows) == len(grid) and len(states) == 1 and states[0]["status"] != "valid":
            # A single text if the whole row has no number.
            words.loc[item.id] = ""
            reason = style.fitted(rows.state_text(states[0]), CELLS_IN)
            style.reason_text(axes, len(grid) / 2, line + 0.5, reason)
    rows.beside(axes, -0.085 / ROW_IN, "knee")
    colors = sns.light_palette("#eba873", as_cmap=True)
    counts.index = [style.fitted(item.label, style.LABEL_IN) for item in study.configurations]
    counts.columns = [f"{rate:.10g}" for rate in grid]
    style.heat_map(axes, counts, words, vmin=0, vmax=len(STROKES), cmap=colors)
    axes.set(xlabel="offered rate (requests/s)", title="criteria of saturation")
