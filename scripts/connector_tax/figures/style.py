"""The common style of figures: theme, footer, text widths, and picture files.

Sizes are inches on paper; no text is smaller than TEXT_PT at single-column width (3.35 in).
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from seaborn.utils import relative_luminance

from connector_tax.figures.tables import Configuration, StudyTables
from connector_tax.files import write_bytes
from connector_tax.marks import AA_MARK, Mark, marks_of

COLUMN_IN = 3.35
PAGE_IN = 7.0
DPI = 300
TEXT_PT = 6.5
LINE_IN = 0.125  # of a footer line
LEGEND_IN = 0.13  # a line of a legend
LABEL_IN = 1.4  # the longest label of a row
MUTED = "#5f5f5f"
BAND = "#e3e6ea"
# Hatching in place of a number, and the box in which its reason is readable.
LOST: dict[str, Any] = {"fc": "white", "ec": "#b5b5b5", "hatch": "\\\\\\\\\\\\", "lw": 0.0}
REASON: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}

sns.set_theme(
    context="paper",
    style="ticks",
    rc={
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 4,
        "axes.labelpad": 2,
        "axes.linewidth": 0.6,
        "axes.edgecolor": "black",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#e9e9e9",
        "grid.linewidth": 0.4,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "lines.linewidth": 0.9,
        "lines.markersize": 3.2,
        "lines.markeredgewidth": 0.6,
        "text.parse_math": False,  # a label may contain any character
        "svg.fonttype": "none",  # text stays text: searchable, and read aloud by a screen reader
    }
    | dict.fromkeys(
        ("font.size", "axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize",
         "legend.fontsize"), TEXT_PT,
    )
    | {f"{axis}tick.{what}": value for axis in "xy" for what, value in (
        ("major.width", 0.6), ("major.size", 2.5), ("major.pad", 2),
        ("minor.width", 0.4), ("minor.size", 1.5))},
)  # fmt: skip


def marks(study: StudyTables) -> dict[str, Mark]:
    """Return the mark of every launched configuration."""
    by_id = marks_of(item.id for item in study.configurations)
    return by_id if study.aa is None else {**by_id, study.aa: AA_MARK}


def marker_style(mark: Mark) -> dict[str, Any]:
    """Return a mark's point as keywords of `Axes.plot` and `Line2D`."""
    face = mark.color if mark.filled else "white"
    return {"color": mark.color, "marker": mark.marker, "markerfacecolor": face}


@dataclass(frozen=True)
class Picture:
    """A drawn figure with its title, or the reason why it could not be drawn."""

    figure: Figure
    title: str
    absent_because: str = ""


class AbsentError(Exception):
    """A figure cannot be drawn for this study; the text says why."""


def laid_out(figure: Figure, handles: Sequence[Artist] = (), columns: int = 1) -> Figure:
    """Return the figure with a legend above the footer and the axes above the legend.

    `handles` are the legend's entries, in `columns` columns.
    """
    foot = figure.subplotpars.bottom
    if handles:
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, foot), ncols=columns,
            handlelength=1.8, handletextpad=0.5, columnspacing=0.8, borderaxespad=0, borderpad=0.3,
            labelspacing=0.35,
        )  # fmt: skip
        lines = math.ceil(len(handles) / columns)
        foot += (LEGEND_IN * lines + 0.06) / figure.get_figheight()
    ConstrainedLayoutEngine(
        rect=(0, foot, 1, 1 - foot), w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.03
    ).execute(figure)
    return figure


def new_figure(
    study: StudyTables, width_in: float, height_in: float, notes: Sequence[str] = ()
) -> Figure:
    """Return an empty figure of this height above a footer: notes, then the engine and a stamp.

    The stamp stands beside the engine if it fits.
    """
    blocks = "1 block, point estimates" if study.blocks == 1 else f"{study.blocks} blocks"
    label = f" · {study.engine_label}" * study.emulated
    stamp = f"{study.name}{label} · {blocks}"
    room_in = width_in - 0.14
    bold_pt = 1.13 * TEXT_PT
    words = "EMULATED, not vLLM" if study.emulated else study.engine_label
    engine = fitted(words, room_in, bold_pt)
    beside_in = text_width_in(engine, bold_pt) + 0.1
    fits = beside_in + text_width_in(stamp, TEXT_PT) <= room_in
    above = [*notes] if fits else [*notes, stamp]
    lines = [line for note in above if note for line in _broken(note, room_in)]
    foot_in = LINE_IN * (len(lines) + 1) + 0.06
    total_in = height_in + foot_in
    figure = Figure(figsize=(width_in, total_in), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(bottom=foot_in / total_in)
    for number, line in enumerate(reversed(lines), 1):
        figure.text(0.07 / width_in, (0.05 + LINE_IN * number) / total_in, line)
    figure.text(0.07 / width_in, 0.05 / total_in, engine, fontweight="bold", gid="engine")
    if fits:
        figure.text((0.07 + beside_in) / width_in, 0.05 / total_in, stamp, color=MUTED)
    return figure


def configuration_handles(
    study: StudyTables, shown: Sequence[Configuration] | None = None
) -> list[Artist]:
    """Return legend entries (line, marker, label) of configurations, by default all."""
    by_id = marks(study)
    return [
        Line2D([], [], ls=by_id[item.id].line, label=fitted(item.label, LABEL_IN),
               **marker_style(by_id[item.id]))
        for item in shown or study.configurations
    ]  # fmt: skip


def panels(figure: Figure, count: int, across: int, share_x: bool) -> np.ndarray:
    """Return `count` panels with one y axis, `across` per row; surplus panels are empty."""
    lines = math.ceil(count / across)
    grid = figure.subplots(lines, min(across, count), squeeze=False, sharex=share_x, sharey=True)
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    return grid


def heat_map(axes: Axes, values: pd.DataFrame, words: pd.DataFrame, **look: Any) -> None:
    """Draw the values as colours with texts; a cell without a value is hatched.

    `look` holds further keywords of `Axes.pcolormesh`. seaborn's heat map would render the whole
    figure once for each map.
    """
    numbers = values.astype(float)
    lost = numbers.isna().to_numpy()
    axes.patch.set(**LOST)
    axes.spines[:].set_visible(False)
    cells = axes.pcolormesh(
        np.ma.masked_array(numbers.to_numpy(), lost), linewidths=0.6, edgecolor="white", **look
    )
    lines, columns = numbers.shape
    axes.set(xlim=(0, columns), ylim=(lines, 0), xlabel="", ylabel="")
    axes.set_xticks(np.arange(columns) + 0.5, numbers.columns)
    axes.set_yticks(np.arange(lines) + 0.5, numbers.index, va="center")
    axes.tick_params(length=0, labelrotation=0)
    cells.update_scalarmappable()
    for (line, place), color in zip(np.ndindex(numbers.shape), cells.get_facecolor(), strict=True):
        if not lost[line, place]:
            axes.text(
                place + 0.5, line + 0.5, str(words.iloc[line, place]), ha="center", va="center",
                color=".15" if relative_luminance(color) > 0.408 else "w", linespacing=0.95,
            )  # fmt: skip
    for line, place in np.argwhere(lost):
        reason_text(axes, place + 0.5, line + 0.5, str(words.iloc[line, place]))


def reason_text(axes: Axes, x: float, y: float, text: str, **place: Any) -> None:
    """Write why there is no number, over the hatching; `place` holds keywords of `Axes.text`."""
    axes.text(x, y, text, ha="center", va="center_baseline", zorder=6, bbox=REASON, **place)


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers, fewer per decade for more decades.

    Unlabelled ticks between them show that the axis is logarithmic.
    """
    decades = math.log10(high / low)
    each: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    if decades > 0.8:
        each = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=each, numticks=30))
    axis.set_minor_locator(LogLocator(base=10, subs=range(2, 10), numticks=30))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


@cache
def text_width_in(text: str, points: float) -> float:
    """Return width in inches of one line of text in the figures' font."""
    font = get_font(findfont(FontProperties()))
    # Measured at a large size, since at text size the hinting of glyphs adds up.
    font.set_size(20 * points, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 / 72 / 20


def fitted(text: str, width_in: float, points: float = TEXT_PT) -> str:
    """Return `text`, shortened with an ellipsis if it is wider than `width_in`."""
    if text_width_in(text, points) <= width_in:
        return text
    while text and text_width_in(text + "…", points) > width_in:
        text = text[:-1]
    return text.rstrip() + "…"


def in_two_lines(text: str, width_in: float, points: float) -> str:
    """Return `text`, broken into two lines if it is wider than `width_in`, and then shortened."""
    first, *rest = _broken(text, width_in, points)
    return "\n".join([first, fitted(" ".join(rest), width_in, points)] if rest else [first])


def _broken(text: str, width_in: float, points: float = TEXT_PT) -> list[str]:
    """Return `text` broken into lines of at most `width_in` inches."""
    characters = max(1, int(len(text) * width_in / text_width_in(text, points)))
    while True:
        lines = textwrap.wrap(text.replace(" %", "\u00a0%"), characters)
        if characters == 1 or all(text_width_in(line, points) <= width_in for line in lines):
            return lines
        characters -= 1


def absent(study: StudyTables, title: str, reason: str) -> Picture:
    """Return the picture that replaces a figure that cannot be drawn, with the reason."""
    figure = new_figure(study, COLUMN_IN, 1.1)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), 1, 1, **LOST))
    words = "\n".join(textwrap.wrap(reason, 56, break_long_words=True))
    reason_text(axes, 0.5, 0.5, f"{title}\nis absent from this study:\n{words}")
    return Picture(figure, title, reason)


def save(picture: Picture, folder: Path, name: str) -> None:
    """Write `name`.png and .svg; equal pictures give equal bytes (no date, fixed ids).

    The SVG's description holds the reason of an absent figure, which `absent_because` reads.
    """
    why = picture.absent_because or None
    for suffix, metadata in (
        ("png", {"Software": None, "Title": picture.title}),
        ("svg", {"Date": None, "Creator": None, "Title": picture.title, "Description": why}),
    ):
        stream = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": name}):
            picture.figure.savefig(stream, format=suffix, dpi=DPI, metadata=metadata)
        write_bytes(folder / f"{name}.{suffix}", stream.getvalue())


def absent_because(svg: bytes) -> str:
    """Return why a saved picture shows no figure; "" if it shows one."""
    match = re.search(r"<dc:description>(.*?)</dc:description>", svg.decode(), re.DOTALL)
    return html.unescape(match[1]) if match else ""
