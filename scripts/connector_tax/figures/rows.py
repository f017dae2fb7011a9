"""Shared parts of figures with a row per configuration: taxes, scales, bands, intervals, texts.

A row is a mapping of a table's columns to Python values; None if there is no number.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from connector_tax.artifacts.metrics import HEADLINE, LATENCY_METRICS
from connector_tax.artifacts.tables import TAX, EffectRow
from connector_tax.figures import style
from connector_tax.figures.tables import StudyTables, frame
from connector_tax.marks import Mark
from connector_tax.text import MINUS, size

METRICS = {metric: LATENCY_METRICS[metric].label for metric in HEADLINE}
LOG_ABOVE = 1.5  # beyond +150 % a linear axis would hide every small tax
LOG_TICKS = (0.0, 1, 4, 0.5, 2, 9, 0.2, 0.1, 0.3, -0.1, -0.5, 19, 49, 99, 499,
             999, -0.75, 0.05, -0.05)  # fmt: skip
APART = 0.22  # share of the axis: the least distance of two ticks
OVERLOAD: dict[str, Any] = {
    "marker": "v", "ls": "none", "ms": 3.8, "mfc": "white", "mec": "black", "mew": 0.6,
}  # fmt: skip
ENDS = ["tax", "tax_lo", "tax_hi"]
BAND = ["aa_lo", "aa_hi"]


# ---- the rows


def measured(study: StudyTables, phase: str) -> pd.DataFrame:
    """Return the taxes of a phase, one for each cell; None for an invalid cell."""
    of = study.of(TAX, phase)
    table = frame(of, EffectRow)
    table[ENDS] = pd.DataFrame([row.shown for row in of], columns=ENDS, dtype=object)
    return table.drop_duplicates(["config", "cell", "metric"])


def taxes(
    study: StudyTables, configs: Iterable[str], references: Sequence[str] = ("ref_safe",),
    metrics: Iterable[str] = METRICS,
) -> pd.DataFrame:  # fmt: skip
    """Return Phase A taxes for plotting: a row for each metric, reference rate and configuration.

    Includes the A/A band: the tax of plain's last launch relative to its other launches.
    """
    keys = ["metric", "reference", "config"]
    wanted = pd.MultiIndex.from_product([list(metrics), references, list(configs)], names=keys)
    table = measured(study, "A")
    noise = table[table["config"] == study.aa].set_index(keys[:2])[ENDS]
    bands = {key: band(*ends) for key, *ends in noise.itertuples()}
    table = wanted.to_frame(index=False).merge(table, how="left", on=keys)
    at = zip(table["metric"], table["reference"], strict=True)
    table[BAND] = pd.DataFrame([bands.get(key, (None, None)) for key in at], dtype=object)
    words = dict.fromkeys(("family", "verdict", "mark", "reason"), "")
    return table.fillna(words | {"status": "missing"})


def numbers(table: pd.DataFrame, columns: Sequence[str] = ENDS) -> list[float]:
    """Return the known numbers in these columns."""
    values = table[list(columns)].to_numpy(dtype=float)
    return [float(value) for value in values[~np.isnan(values)]]


def size_text(row: Mapping[Any, Any], columns: Sequence[str] = ENDS, factor: float = 100.0) -> str:
    """Return text with a number, by default a tax in per cent, and its interval."""
    return size(*(None if row[name] is None else factor * row[name] for name in columns))


def state_text(row: Mapping[Any, Any]) -> str:
    """Return why a row has no number, such as 'void: error rate 0.2 > 0.01'."""
    return f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])


# ---- scales and bands


def scale(
    axes: Axes, values: Iterable[float], room: float, which: str = "x", factor: float = 1.0,
    ticks: int = 5, least: float = 0.0,
) -> None:  # fmt: skip
    """Scale an axis linearly to include the values and zero, with a line at zero and signed ticks.

    `room` is the free share of the range at either end; the range is at least `least`. There are at
    most `ticks` ticks, labelled with `factor` times the value.
    """
    listed = [0.0, *values]
    low, high = min(listed), max(listed)
    free = room * (max(high - low, least) or 1.0)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}lim": (low - free, high + free)})
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(factor * value)))
    axis.grid(True)
    (axes.axvline if which == "x" else axes.axhline)(0, color="black", lw=0.6, zorder=2)


def tax_scale(
    axes: Axes, values: Iterable[float], which: str = "x", logarithmic: bool = False
) -> None:
    """Scale an axis for taxes, with ticks in per cent.

    The scale is linear or, on request or if a tax exceeds +150 %, logarithmic in config/plain (zero
    stays the base line). A difference of taxes below -100 % is not a ratio and keeps the axis
    linear.
    """
    listed = [0.0, *values]
    low, high = min(listed), max(listed)
    room = 0.04
    scale(axes, listed, room, which, factor=100, least=0.05)
    if (high <= LOG_ABOVE and not logarithmic) or low <= -1.0:
        return
    functions = (lambda x: np.log1p(np.maximum(x, -0.999)), np.expm1)
    (axes.set_xscale if which == "x" else axes.set_yscale)("function", functions=functions)
    span = np.log1p(high) - np.log1p(low)
    ends = (np.expm1(np.log1p(low) - room * span), np.expm1(np.log1p(high) + room * span))
    ticks: list[float] = []
    for tick in LOG_TICKS:
        near = [abs(np.log1p(tick) - np.log1p(other)) < APART * span for other in ticks]
        if ends[0] <= tick <= ends[1] and not any(near):
            ticks.append(tick)
    labels = [_tick(100 * tick) for tick in ticks]
    axes.set(**{f"{which}lim": ends, f"{which}ticks": ticks, f"{which}ticklabels": labels})


def tax_label(study: StudyTables, axes: Axes, which: str = "x") -> str:
    """Return the label of a scaled tax axis."""
    scale = axes.get_xscale() if which == "x" else axes.get_yscale()
    return study.against(f"tax over plain ({'%' if scale == 'linear' else '%, log ratio'})")


def _tick(value: float) -> str:
    rounded = round(value, 9)
    if abs(rounded) >= 10_000:
        return f"{rounded / 1000:+,.6g}k".replace("-", MINUS)
    return f"{rounded:+,.6g}".replace("-", MINUS) if rounded else "0"


def band(
    point: float | None, low: float | None, high: float | None
) -> tuple[float | None, float | None]:
    """Return the ends of an A/A band: its interval, or -|point| and |point| without interval."""
    if point is None or (low is not None and high is not None):
        return low, high
    return -abs(point), abs(point)


def shade(axes: Axes, panel: pd.DataFrame) -> None:
    """Shade the A/A band of a panel's rows across its axis."""
    for low, high in panel[BAND].dropna().drop_duplicates()[:1].itertuples(index=False):
        axes.axvspan(low, high, color=style.BAND, lw=0, zorder=0.5)


# ---- texts of footer and legend


def aa_text(study: StudyTables) -> str:
    """Return the footer's text on the A/A band at ref_safe."""
    row = study.at("ref_safe", "ttft_p90").get(study.aa or "")
    if row is None or row.status != "valid":
        return study.against("no A/A band: plain has no second valid launch")
    how = f"±|plain/plain {MINUS} 1| of two launches" if row.lo is None else "plain over plain"
    return study.against(f"grey: A/A, {how}")


def interval_text(table: pd.DataFrame) -> str:
    """Return the meaning of the taxes' intervals, or why there are none."""
    if numbers(table, ["family_lo"]):
        return "95 % intervals, joint per cell"
    if numbers(table, ["tax_lo"]):
        return "95 % intervals, each alone"
    return "no intervals: one launch; launches not included"


def tax_text(table: pd.DataFrame) -> str:
    """Return text on the taxes' intervals, the exploratory taxes, and the number of requests."""
    by_family = table[table["family"] != ""].groupby("family", sort=False)["reference"].unique()
    families = [f"{', '.join(ids)}: {name}" for name, ids in by_family.items()]
    if len(by_family) == 1:
        families = [by_family.index[0]]
    return "; ".join([interval_text(table), *families, n_range(table[table["tax"].notna()]["n"])])


def n_range(counts: Iterable[int | None]) -> str:
    """Return sample counts as text: 'n = 200 to 612'."""
    known = [count for count in counts if count]
    low, high = min(known, default=0), max(known, default=0)
    return f"n = {low:,}" if low == high else f"n = {low:,} to {high:,}"


def overload_handles(table: pd.DataFrame, label: str = "marked: no verdict") -> list[Artist]:
    """Return the legend's entry for marked taxes, if a drawn tax is marked."""
    marked = table["tax"].notna() & (table["mark"] != "")
    return [Line2D([], [], label=label, **OVERLOAD)] if marked.any() else []


def band_handle(table: pd.DataFrame) -> Patch:
    """Return the legend's entry for the A/A band."""
    label = "A/A band" if numbers(table, BAND) else "no A/A band"
    return Patch(facecolor=style.BAND, label=label)


# ---- drawing


def prepare(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Prepare axes for rows from top to bottom, with names on the left, no frame, and a title."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    names = [label if "\n" in label else style.fitted(label, style.LABEL_IN) for label in labels]
    axes.set_yticks(range(len(names)), names, linespacing=1.0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(title)


def value(
    axes: Axes, y: float, row: Mapping[Any, Any], columns: Sequence[str] = ENDS,
    mark: Mark | None = None, height: float = 0.8,
) -> bool:  # fmt: skip
    """Draw a row's interval, its point if `mark` is given, and a triangle if its tax is marked.

    If there is no number, draw hatching and the reason. Returns whether there is a number.
    """
    number, low, high = (row[name] for name in columns)
    if number is None:
        at = axes.get_yaxis_transform()
        whole = Rectangle((0, y - height / 2), 1, height, transform=at, zorder=1, **style.LOST)
        axes.add_patch(whole)
        style.reason_text(axes, 0.5, y, style.fitted(state_text(row), 1.3), transform=at)
        return False
    if low is not None and high is not None:
        color = mark.color if mark else "black"
        axes.plot([low, high], [y, y], "|-", color=color, lw=0.7, ms=3, mew=0.7, zorder=5)
    if mark:
        axes.plot(number, y, zorder=6, clip_on=False, **style.marker_style(mark))
    if row.get("mark"):
        axes.plot(number, y, zorder=7, **OVERLOAD)
    return True


def beside(axes: Axes, y: float, text: str, bold: bool = False) -> None:
    """Write text beside a row, to the right of the axes."""
    axes.annotate(
        text, (1, y), xycoords=axes.get_yaxis_transform(), xytext=(4, 0),
        textcoords="offset points", va="center_baseline", annotation_clip=False,
        fontweight="bold" if bold else "normal",
    )  # fmt: skip


def need_ref_safe(study: StudyTables) -> None:
    """Raise AbsentError for a figure at ref_safe if Phase A has no cell at that rate."""
    if not study.cell_at("ref_safe"):
        rate = study.reference["ref_safe"]
        raise style.AbsentError(f"ref_safe, {rate:g} req/s, is not a rate of Phase A.")


def need_steps(study: StudyTables) -> None:
    """Raise AbsentError for a figure of engine steps at ref_safe without step records."""
    if not study.patch["step_timing_available"]:
        why = study.patch.get("reason") or "the step probe could not be installed"
        raise style.AbsentError(f"no step timing: {why} (patch/patch_status.json).")
    need_ref_safe(study)
