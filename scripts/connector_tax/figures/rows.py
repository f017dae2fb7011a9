"""What the figures with a row for each configuration share: scale, band, intervals, words."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import style
from connector_tax.figures.tables import StudyTables
from connector_tax.text import MINUS, size

METRICS = {"ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90"}
LOG_ABOVE = 1.5  # beyond +150 % a linear axis would hide every small tax
LOG_TICKS = (0.0, 1, 4, 0.5, 2, 9, -0.5, 19, 49, 99, 499, 999, -0.75)
APART = 0.22  # of the axis: the least distance of two ticks
OVERLOAD: dict[str, Any] = {
    "marker": "v", "ls": "none", "ms": 3.8, "mfc": "white", "mec": "black", "mew": 0.6,
}  # fmt: skip
ENDS = ("tax", "tax_lo", "tax_hi")
TAX_COLUMNS = (
    "config", "metric", "reference", "rate_rps", *ENDS, "aa_lo", "aa_hi", "n_blocks", "n_config",
    "n_plain", "family", "verdict", "mark", "status", "reason",
)  # fmt: skip


def numbers(row: TaxRow | None) -> list[float]:
    """The drawn numbers of a valid row: tax and, where known, the ends of its interval."""
    if row is None or row.status != "valid":
        return []
    return [value for value in (row.tax, row.tax_lo, row.tax_hi) if value is not None]


def tax_scale(axes: Axes, values: Iterable[float], which: str = "x", room: float = 0.04) -> None:
    """Scale an axis for taxes, ticks in per cent.

    Linear, or, when a tax exceeds +150 %, logarithmic in config/plain (zero stays the base line);
    a difference of two taxes below -100 % is no ratio, and keeps the axis linear.
    `room` is what is left free at either end, as a share of the range.
    """
    listed = [0.0, *values]
    low, high = min(listed), max(listed)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if high <= LOG_ABOVE or low <= -1.0:
        span = max(high - low, 0.05)
        axes.set(**{f"{which}lim": (low - room * span, high + room * span)})
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    else:
        scale = {"functions": (lambda x: np.log1p(np.maximum(x, -0.999)), np.expm1)}
        (axes.set_xscale if which == "x" else axes.set_yscale)("function", **scale)
        span = np.log1p(high) - np.log1p(low)
        ends = (np.expm1(np.log1p(low) - room * span), np.expm1(np.log1p(high) + room * span))
        axes.set(**{f"{which}lim": ends})
        ticks: list[float] = []
        for tick in LOG_TICKS:
            near = [abs(np.log1p(tick) - np.log1p(other)) < APART * span for other in ticks]
            if ends[0] <= tick <= ends[1] and not any(near):
                ticks.append(tick)
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_tick))
    axes.grid(axis="x" if which == "x" else "y")
    (axes.axvline if which == "x" else axes.axhline)(0, color="black", lw=0.6, zorder=2)


def tax_label(study: StudyTables, axes: Axes, which: str = "x") -> str:
    """The words of a scaled tax axis."""
    scale = axes.get_xscale() if which == "x" else axes.get_yscale()
    return study.against(f"tax over plain ({'%' if scale == 'linear' else '%, log ratio'})")


def _tick(value: float, _position: int | None = None) -> str:
    scaled = round(100 * value, 6)
    return "0" if scaled == 0 else f"{scaled:+.10g}".replace("-", MINUS)


def aa_interval(study: StudyTables, reference: str, metric: str) -> tuple[float, float] | None:
    """The A/A band: the interval of the tax of plain's last launch against its others.

    ±|tax| where it has no interval; None where it has no number.
    """
    row = study.noise_at(reference, metric)
    if row is None or row.status != "valid":
        return None
    return band(row.tax, row.tax_lo, row.tax_hi)


def band(point: float | None, low: float | None, high: float | None) -> tuple[float, float] | None:
    """An interval, or where there is none the size of its point both ways."""
    if point is None:
        return None
    return (-abs(point), abs(point)) if low is None or high is None else (low, high)


def shade(axes: Axes, ends: tuple[float, float] | None) -> None:
    """Shade the A/A band across an axis."""
    if ends is not None and ends[0] < ends[1]:
        axes.axvspan(*ends, color=style.BAND, lw=0, zorder=0.5)


def aa_text(study: StudyTables) -> str:
    """A footer's words for the A/A band at ref_safe."""
    row = study.noise_at("ref_safe", "ttft_p90")
    if row is None or not numbers(row):
        return study.against("no A/A band: plain has no second valid launch")
    how = f"±|plain/plain {MINUS} 1| of two launches" if row.tax_lo is None else "plain over plain"
    return study.against(f"grey band: A/A, {how}")


def family_text(rows: Iterable[TaxRow | None]) -> str:
    """Which family the taxes drawn belong to: `confirmatory`, or which of them are exploratory."""
    by_family: dict[str, list[str]] = {}
    for row in rows:
        if row is not None and row.reference not in by_family.setdefault(row.family, []):
            by_family[row.family].append(row.reference)
    if len(by_family) < 2:
        return "".join(f"{name} taxes" for name in by_family)
    return "; ".join(f"{', '.join(ids)}: {name}" for name, ids in by_family.items())


def interval_text(rows: Iterable[TaxRow | None]) -> str:
    """What the bars' intervals are, or why there is none."""
    drawn = [row for row in rows if row is not None and numbers(row)]
    if any(row.tax_lo is not None for row in drawn):
        return "95 % intervals"
    return "no intervals: one launch; launches not included"


def sample_text(rows: Iterable[TaxRow | None]) -> str:
    """How many requests stand behind the taxes drawn."""
    counts = [row.n_config for row in rows if row is not None and row.n_config and numbers(row)]
    return f"{n_range(counts)} requests per tax"


def n_range(counts: Sequence[int]) -> str:
    """Sample counts as text: 'n = 200 to 612'."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"n = {low:,}" if low == high else f"n = {low:,} to {high:,}"


def overload_handles(
    rows: Iterable[TaxRow | None], label: str = "saturated or dropped arrivals: no verdict"
) -> list[Artist]:
    """The legend's entry for marked taxes, where one of the rows drawn is."""
    if not any(row is not None and row.mark and numbers(row) for row in rows):
        return []
    return [Line2D([], [], label=label, **OVERLOAD)]


def band_handle(known: object) -> Patch:
    """The legend's entry for the A/A band."""
    return Patch(facecolor=style.BAND, label="A/A band" if known else "no A/A band")


def prepare(axes: Axes, labels: Sequence[str], title: str) -> None:
    """Rows top to bottom with their names on the left, no frame there; a title."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), [style.fitted(label, style.LABEL_IN) for label in labels])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(title)


def interval(
    axes: Axes, y: float, low: float | None, high: float | None, color: str = "black"
) -> None:
    """An interval as a thin line with end strokes; nothing where there is none."""
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=color, lw=0.7, zorder=5)
        axes.plot([low, high], [y, y], "|", color=color, ms=3, mew=0.7, zorder=5)


def beside(axes: Axes, y: float, text: str, bold: bool = False, offset: float = 4) -> None:
    """Words just right of the axes in a row; `offset` in points."""
    axes.annotate(
        text, (1, y), xycoords=axes.get_yaxis_transform(), xytext=(offset, 0),
        textcoords="offset points", va="center_baseline", annotation_clip=False,
        fontweight="bold" if bold else "normal",
    )  # fmt: skip


def lost(axes: Axes, y: float, height: float, reason: str, width_in: float) -> None:
    """A hatched row with the reason, in place of a number that is not there."""
    transform = axes.get_yaxis_transform()
    axes.add_patch(
        Rectangle((0, y - height / 2), 1, height, transform=transform, zorder=1, **style.LOST)
    )
    axes.text(
        0.5, y, style.fitted(reason, width_in), ha="center", va="center_baseline",
        transform=transform, zorder=6, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
    )  # fmt: skip


def state_text(row: TaxRow | None) -> str:
    """Why there is no number: 'void: error rate 0.2 > 0.01'."""
    if row is None:
        return "missing"
    return f"{row.status}: {row.reason}" if row.reason else row.status


def tax_record(
    row: TaxRow | None, config: str, metric: str, reference: str,
    aa: tuple[float, float] | None = None,
) -> dict[str, object]:  # fmt: skip
    """A tax row as plotted, for the figure's CSV."""
    record: dict[str, object] = dict.fromkeys(TAX_COLUMNS) | {"status": "missing"}
    record |= dict.fromkeys(("family", "verdict", "mark", "reason"), "")
    if row is not None:
        record |= {name: getattr(row, name) for name in TAX_COLUMNS}
    record |= {"config": config, "metric": metric, "reference": reference}
    record |= dict(zip(("aa_lo", "aa_hi"), aa or (None, None), strict=True))
    return record if numbers(row) else record | dict.fromkeys(ENDS)


def tax_size(row: TaxRow) -> str:
    """A tax in per cent with its interval."""
    return size(*(None if v is None else 100 * v for v in (row.tax, row.tax_lo, row.tax_hi)))


def no_reference(study: StudyTables, name: str) -> style.Picture | None:
    """The stand-in for a figure at ref_safe when Phase A has no cell at that rate, else None."""
    if study.taxes_at("ref_safe", "ttft_p90"):
        return None
    rate = study.reference["ref_safe"]
    if rate is None:
        return style.absent(study, name, "no rate qualifies as ref_safe (reference_rates.json).")
    return style.absent(study, name, f"ref_safe, {rate:g} req/s, is not a rate of Phase A.")


def no_steps(study: StudyTables, name: str) -> style.Picture | None:
    """The stand-in for a figure of engine steps when there are no step records, else None."""
    if study.patch["step_timing_available"]:
        return None
    reason = study.patch.get("reason") or "the step probe could not be installed"
    return style.absent(study, name, f"no step timing: {reason} (patch/patch_status.json).")
