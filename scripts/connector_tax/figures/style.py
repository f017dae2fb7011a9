"""One look for every figure: sizes, fonts, stamp and watermark; the marks are in `marks`.

Sizes are inches on paper; type is legible at a single column's width (3.35 in).
"""

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from connector_tax.figures.tables import StudyTables
from connector_tax.files import write_bytes, write_text
from connector_tax.marks import AA_MARK, Mark, marks_of
from connector_tax.text import MINUS

COLUMN_IN = 3.35
PAGE_IN = 7.0
DPI = 300
TEXT_PT = 6.5
SMALL_PT = 5.5
MUTED = "#5f5f5f"
FAINT = "#c9c9c9"
BAND = "#e3e6ea"

mpl.rcParams.update(
    {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
        "font.size": TEXT_PT,
        "axes.labelsize": TEXT_PT,
        "axes.titlesize": TEXT_PT,
        "axes.titleweight": "bold",
        "axes.titlepad": 3,
        "axes.labelpad": 2,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#e9e9e9",
        "grid.linewidth": 0.4,
        "xtick.labelsize": 6,
        "ytick.labelsize": 6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.minor.size": 1.5,
        "ytick.minor.size": 1.5,
        "xtick.major.pad": 2,
        "ytick.major.pad": 2,
        "hatch.linewidth": 0.5,
        "lines.linewidth": 0.9,
        "lines.markersize": 3.2,
        "text.parse_math": False,  # a label may hold any character
        "svg.fonttype": "none",  # text stays text: searchable, and read aloud by a screen reader
    }
)


def marks(study: StudyTables) -> dict[str, Mark]:
    """The mark of every launched configuration."""
    by_id = marks_of(item.id for item in study.configurations)
    return by_id if study.aa is None else {**by_id, study.aa: AA_MARK}


@dataclass(frozen=True)
class Picture:
    """A drawn figure and the numbers in it, row by row."""

    figure: Figure
    columns: Sequence[str]
    rows: Sequence[Mapping[str, object]]


def watermark_text(study: StudyTables) -> str | None:
    """What is written across a figure that does not show a GPU's numbers; None for a real GPU."""
    if study.emulated:
        return "EMULATED"
    return None if study.engine_label == "real vLLM, GPU" else study.engine_label


def new_figure(study: StudyTables, width_in: float, height_in: float, note: str = "") -> Figure:
    """An empty figure with the study's stamp at the bottom and, off the GPU, a watermark."""
    blocks = (
        "1 block, point estimates" if study.blocks == 1 else f"{study.blocks} blocks per config."
    )
    stamp = f"{study.name} · {study.engine_label} · {blocks}"
    return stamped_figure(stamp, watermark_text(study), (width_in, height_in), note)


def stamped_figure(
    stamp: str, watermark: str | None, size_in: tuple[float, float], note: str = ""
) -> Figure:
    """An empty figure with a stamp, a note at the bottom right, and text across it."""
    width_in, height_in = size_in
    figure = Figure(figsize=size_in, dpi=DPI)
    FigureCanvasAgg(figure)
    room_in = width_in - 0.3
    fits = text_width_in(stamp, TEXT_PT) + text_width_in(note, TEXT_PT) < room_in
    small: dict[str, Any] = {"fontsize": TEXT_PT if fits else 5, "color": MUTED, "va": "bottom"}
    figure.text(0.06 / width_in, 0.05 / height_in, stamp, ha="left", **small)
    if note:
        figure.text(1 - 0.06 / width_in, 0.05 / height_in, note, ha="right", **small)
    if watermark:
        across = 0.72 * len(watermark)
        up = across * math.sin(math.radians(24)) + 1
        points = min(34.0, 72 * 0.8 * width_in / across, 72 * 0.85 * height_in / up)
        figure.text(
            0.5, 0.55, watermark, fontsize=points, fontweight="bold", color="#000000", alpha=0.075,
            ha="center", va="center", rotation=24, zorder=10,
        )  # fmt: skip
    return figure


def axes_in(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes placed in inches from the figure's lower left corner."""
    total_width, total_height = figure.get_size_inches()
    return figure.add_axes(
        (left / total_width, bottom / total_height, width / total_width, height / total_height)
    )


def text_width_in(text: str, points: float) -> float:
    """Width in inches of one line of text in the figures' font."""
    font = get_font(findfont(FontProperties()))
    # Measured large: at the size of the text the hinting of single glyphs adds up.
    font.set_size(20 * points, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 / 72 / 20


def fitted(text: str, width_in: float, points: float) -> str:
    """`text`, shortened with an ellipsis if it is wider than `width_in`."""
    if text_width_in(text, points) <= width_in:
        return text
    while text and text_width_in(text + "…", points) > width_in:
        text = text[:-1]
    return text.rstrip() + "…"


def label_margin_in(labels: Sequence[str], points: float, most: float = 1.2) -> float:
    """Room needed left of an axis for the widest of `labels`, in inches, at most `most`."""
    return min(most, max(text_width_in(label, points) for label in labels))


def percent(value: float, like: float | None = None) -> str:
    """A tax in per cent, signed; one decimal if it (or `like`) is below 10 %, else none."""
    decimals = 1 if abs(100 * (value if like is None else like)) < 9.95 else 0
    return f"{round(100 * value, decimals) + 0.0:+.{decimals}f}".replace("-", MINUS)


def signed(value: float) -> str:
    """A whole number with its sign, a real minus; zero has none."""
    whole = round(value)
    return f"{whole:+d}".replace("-", MINUS) if whole else "0"


def line_sample(axes: Axes, x: tuple[float, float], y: float, mark: Mark) -> None:
    """A short piece of a configuration's line with its marker, in axes coordinates, unclipped."""
    sample = Line2D(
        [x[0], (x[0] + x[1]) / 2, x[1]], [y, y, y], color=mark.color, linestyle=mark.line,
        marker=mark.marker, markevery=[1], markersize=3.2,
        markerfacecolor=mark.color if mark.filled else "white", markeredgewidth=0.6,
        transform=axes.transAxes, clip_on=False,
    )  # fmt: skip
    axes.add_line(sample)


def hatched(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """A hatched patch in data coordinates: no number here, and the text beside it says why."""
    axes.add_patch(
        Rectangle(
            (x, y), width, height, facecolor="white", edgecolor="#b5b5b5", hatch="\\\\\\\\\\\\",
            linewidth=0.4, zorder=1,
        )
    )  # fmt: skip


def absent(study: StudyTables, title: str, reason: str) -> Picture:
    """The picture that stands in for a figure that cannot be drawn, and says why."""
    figure = new_figure(study, COLUMN_IN, 1.3)
    axes = axes_in(figure, 0.12, 0.25, COLUMN_IN - 0.24, 0.93)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    hatched(axes, 0, 0, 1, 1)
    axes.text(
        0.5, 0.5, f"{title}\nis absent from this study:\n{wrapped(reason, 58)}", ha="center",
        va="center", fontsize=6.5, linespacing=1.35, zorder=3,
        bbox={"facecolor": "white", "edgecolor": "#b5b5b5", "linewidth": 0.5, "pad": 5},
    )  # fmt: skip
    return Picture(figure, ("absent_because",), [{"absent_because": reason}])


def wrapped(text: str, characters: int) -> str:
    """`text` broken into lines of at most `characters`."""
    return "\n".join(textwrap.wrap(text, characters, break_long_words=True)) or text


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """The plotted numbers as CSV; None is an empty field, floats keep every digit."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row[name] is None else row[name] for name in columns])
    return stream.getvalue()


def save(picture: Picture, folder: Path, name: str, title: str) -> None:
    """Write `name`.png, .svg and .csv; equal pictures give equal bytes (no date, fixed ids)."""
    for suffix, metadata in (
        ("png", {"Software": None, "Title": title}),
        ("svg", {"Date": None, "Creator": None, "Title": title}),
    ):
        stream = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": name}):
            picture.figure.savefig(stream, format=suffix, dpi=DPI, metadata=metadata)
        write_bytes(folder / f"{name}.{suffix}", stream.getvalue())
    write_text(folder / f"{name}.csv", csv_text(picture.columns, picture.rows))


def log_ticks(axes: Axes, low: float, high: float) -> None:
    """Plain numbers on a logarithmic y axis, fewer per decade the more decades there are."""
    decades = math.log10(high / low)
    subdivisions: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    if decades > 0.8:
        subdivisions = (1.0,) if decades > 3 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subdivisions, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.set_ylim(low, high)
