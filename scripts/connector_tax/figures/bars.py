"""What the tax figures share: rows of configurations against a tax axis with its A/A band."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from connector_tax.artifacts.tables import TaxRow
from connector_tax.figures import style
from connector_tax.figures.tables import StudyTables
from connector_tax.text import MINUS

METRIC_LABELS = {"ttft_p90": "TTFT p90", "tpot_p90": "TPOT p90"}
LOG_ABOVE = 1.5  # beyond +150 % a linear axis would hide every small tax
TICK_IN = 0.3  # room for one tick label
NARROW_IN = 1.2  # an axis for which the whole label is too long
CHARACTER_IN = 0.055  # of a tick label
OVERLOAD_MARKER = "v"
LOG_TICKS = (0.0, 0.5, 1, 2, 4, 9, 19, 49, 99, 499, 999, -0.5, -0.75)


def numbers(row: TaxRow | None) -> list[float]:
    """The drawn numbers of a valid row: tax and, where known, the ends of its interval."""
    if row is None or row.status != "valid":
        return []
    return [value for value in (row.tax, row.tax_lo, row.tax_hi) if value is not None]


def tax_axis(axes: Axes, values: Iterable[float], room: float = 0.2) -> None:
    """Scale the x axis for taxes, ticks in per cent, with `room` (a share) right of the data.

    Linear, or, when a tax exceeds +150 %, logarithmic in config/plain (zero stays the base line).
    """
    listed = [0.0, *values]
    low, high = min(listed), max(listed)
    width_in = axes.get_window_extent().width / style.DPI
    if high <= LOG_ABOVE:
        span = max(high - low, 0.05)
        axes.set_xlim(low - 0.04 * span, high + room * span)
        bins = max(2, min(6, int(width_in / TICK_IN)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=bins, steps=[1, 2, 5, 10]))
        suffix = ""
    else:
        axes.set_xscale("function", functions=(lambda x: np.log1p(np.maximum(x, -0.999)), np.expm1))
        span = np.log1p(high) - np.log1p(low)
        axes.set_xlim(np.expm1(np.log1p(low) - 0.04 * span), np.expm1(np.log1p(high) + room * span))
        scale = width_in / ((1.04 + room) * span)
        ticks: list[float] = []
        for tick in (tick for tick in LOG_TICKS if low * 1.05 <= tick <= high * 1.2):
            if all(
                scale * abs(np.log1p(tick) - np.log1p(kept)) > _labels_in(tick, kept)
                for kept in ticks
            ):
                ticks.append(tick)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        suffix = ", log ratio"
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    over = " over plain" if width_in > NARROW_IN else ""
    axes.set_xlabel(f"tax{over} (%{suffix})")
    axes.axvline(0, color="black", lw=0.6, zorder=4)
    axes.grid(axis="x")


def _labels_in(tick: float, other: float) -> float:
    """How far apart, in inches, two tick labels must stand to be told apart."""
    return CHARACTER_IN * (len(_tick(tick)) + len(_tick(other)) + 2) / 2


def _tick(value: float, _position: int | None = None) -> str:
    scaled = round(100 * value, 6)
    return "0" if scaled == 0 else f"{scaled:+.10g}".replace("-", MINUS)


def aa_interval(study: StudyTables, reference: str, metric: str) -> tuple[float, float] | None:
    """The A/A band: the interval of the tax of plain's last launch against its others.

    ±|tax| where it has no interval; None where it has no number.
    """
    row = study.noise_at(reference, metric)
    if row is None or row.status != "valid" or row.tax is None:
        return None
    if row.tax_lo is not None and row.tax_hi is not None:
        return row.tax_lo, row.tax_hi
    return -abs(row.tax), abs(row.tax)


def aa_band(axes: Axes, band: tuple[float, float] | None, dashed: bool = False) -> None:
    """Shade the A/A band across an axis, or outline it when another band is already shaded."""
    if band is None:
        return
    if dashed:
        for end in band:
            axes.axvline(end, color="#8b95a1", lw=0.6, linestyle=(0, (3, 2)), zorder=0.7)
    else:
        axes.axvspan(*band, color=style.BAND, lw=0, zorder=0.5)


def aa_text(study: StudyTables, metrics: Sequence[str] = ("ttft_p90",)) -> str:
    """The legend's words for the A/A band at ref_safe."""
    rows = [study.noise_at("ref_safe", metric) for metric in metrics]
    if not any(numbers(row) for row in rows):
        return "no A/A band: plain has no second valid launch"
    whole = all(row is not None and row.tax_lo is not None for row in rows)
    how = "interval of plain/plain" if whole else f"±|plain/plain {MINUS} 1| of two launches"
    return f"grey band: A/A, {how}"


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


def overload_mark(axes: Axes, x: float, y: float) -> None:
    """An open triangle at a tax whose latencies are those of survivors."""
    axes.plot(
        x, y, OVERLOAD_MARKER, ms=3.6, mfc="white", mec="black", mew=0.6, zorder=7, clip_on=False
    )


def overload_handle() -> Line2D:
    """The legend's entry for `overload_mark`."""
    return Line2D(
        [], [], marker=OVERLOAD_MARKER, ls="none", ms=3.6, mfc="white", mec="black", mew=0.6,
        label="saturated or dropped arrivals: no verdict",
    )  # fmt: skip


def marked(rows: Iterable[TaxRow | None]) -> bool:
    """Whether any of the taxes drawn carries a mark."""
    return any(row is not None and row.mark and numbers(row) for row in rows)


def row_labels(axes: Axes, labels: Sequence[str], width_in: float) -> None:
    """Names of the rows on the left, top to bottom; no ticks, no frame."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), [style.fitted(label, width_in, 6) for label in labels])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def interval(axes: Axes, y: float, row: TaxRow, color: str = "black") -> None:
    """The interval of a tax as a thin bar with end strokes."""
    if row.tax_lo is None or row.tax_hi is None:
        return
    axes.plot([row.tax_lo, row.tax_hi], [y, y], color=color, lw=0.7, zorder=5)
    for end in (row.tax_lo, row.tax_hi):
        axes.plot([end, end], [y - 0.08, y + 0.08], color=color, lw=0.7, zorder=5)


def beside(axes: Axes, y: float, values: Sequence[float], text: str) -> None:
    """A number just right of everything drawn in its row."""
    axes.annotate(
        text, (max([0.0, *values]), y), xytext=(2.5, 0), textcoords="offset points",
        va="center_baseline", fontsize=style.SMALL_PT, zorder=6, annotation_clip=False,
    )  # fmt: skip


def no_number(axes: Axes, y: float, height: float, row: TaxRow | None, width_in: float) -> None:
    """A hatched row with the reason, in place of a bar that cannot be drawn."""
    low, high = axes.get_xlim()
    style.hatched(axes, low, y - height / 2, high - low, height)
    axes.text(
        0.5, y, style.fitted(state_text(row), width_in, 5), fontsize=5, ha="center",
        va="center_baseline", transform=axes.get_yaxis_transform(), color="#333333", zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.9},
    )  # fmt: skip


def state_text(row: TaxRow | None) -> str:
    """Why there is no number: 'void: error rate 0.2 > 0.01'."""
    if row is None:
        return "missing"
    return f"{row.status}: {row.reason}" if row.reason else row.status


def tax_record(row: TaxRow | None, config: str, metric: str, reference: str) -> dict[str, object]:
    """A tax row as plotted, for the figure's CSV."""
    valid = row is not None and row.status == "valid"
    return {
        "config": config, "metric": metric, "reference": reference,
        "rate_rps": row.rate_rps if row else None,
        "tax": row.tax if row and valid else None, "tax_lo": row.tax_lo if row and valid else None,
        "tax_hi": row.tax_hi if row and valid else None,
        "aa_lo": None, "aa_hi": None,
        "n_blocks": row.n_blocks if row else None, "n_config": row.n_config if row else None,
        "n_plain": row.n_plain if row else None, "family": row.family if row else "",
        "verdict": row.verdict if row else "", "mark": row.mark if row else "",
        "status": row.status if row else "missing", "reason": row.reason if row else "",
    }  # fmt: skip


TAX_COLUMNS = (
    "config", "metric", "reference", "rate_rps", "tax", "tax_lo", "tax_hi", "aa_lo", "aa_hi",
    "n_blocks", "n_config", "n_plain", "family", "verdict", "mark", "status", "reason",
)  # fmt: skip


def sample_note(rows: Iterable[TaxRow | None]) -> str:
    """How many requests stand behind the taxes drawn, as text."""
    counts = [row.n_config for row in rows if row is not None and row.n_config and numbers(row)]
    if not counts:
        return "n = 0"
    low, high = min(counts), max(counts)
    return f"n = {low} requests per tax" if low == high else f"n = {low} to {high} per tax"


def no_reference(study: StudyTables, title: str) -> style.Picture | None:
    """The stand-in for a figure at ref_safe when Phase A has no cell at that rate, else None."""
    if study.taxes_at("ref_safe", "ttft_p90"):
        return None
    rate = study.reference["ref_safe"]
    if rate is None:
        return style.absent(study, title, "no rate qualifies as ref_safe (reference_rates.json).")
    return style.absent(study, title, f"ref_safe, {rate:g} req/s, is not a rate of Phase A.")


def no_steps(study: StudyTables, title: str) -> style.Picture | None:
    """The stand-in for a figure of engine steps when there are no step records, else None."""
    if study.patch["step_timing_available"]:
        return None
    reason = study.patch.get("reason") or "the step probe could not be installed"
    reason = f"no step timing: {reason} (patch/patch_status.json)."
    return style.absent(study, title, reason)
