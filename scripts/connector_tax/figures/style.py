"""One look for every figure: theme, footer, widths of text, and the files of a picture.

Sizes are inches on paper; nothing is smaller than TEXT_PT at a single column's width (3.35 in).
"""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from connector_tax.figures.names import FIGURES
from connector_tax.figures.tables import StudyTables
from connector_tax.files import write_bytes, write_text
from connector_tax.marks import AA_MARK, Mark, marks_of

COLUMN_IN = 3.35
PAGE_IN = 7.0
DPI = 300
TEXT_PT = 6.5
LINE_IN = 0.125  # of the footer
BANNER_IN = 0.19
LEGEND_IN = 0.13  # a line of a legend
LABEL_IN = 1.2  # the longest label of a row
MUTED = "#5f5f5f"
BAND = "#e3e6ea"
LOST: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": "#b5b5b5",
    "hatch": "\\\\\\\\\\\\",
    "linewidth": 0.0,
}

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
        "axes.axisbelow": True,
        "grid.color": "#e9e9e9",
        "grid.linewidth": 0.4,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "lines.linewidth": 0.9,
        "lines.markersize": 3.2,
        "lines.markeredgewidth": 0.6,
        "text.parse_math": False,  # a label may hold any character
        "svg.fonttype": "none",  # text stays text: searchable, and read aloud by a screen reader
    }
    | dict.fromkeys(
        ("font.size", "axes.labelsize", "axes.titlesize", "xtick.labelsize", "ytick.labelsize",
         "legend.fontsize"), TEXT_PT,
    )
    | {f"{axis}tick.{which}.{what}": size for axis in "xy" for which, what, size in (
        ("major", "width", 0.6), ("minor", "width", 0.4), ("major", "size", 2.5),
        ("minor", "size", 1.5), ("major", "pad", 2))},
)  # fmt: skip


def marks(study: StudyTables) -> dict[str, Mark]:
    """The mark of every launched configuration."""
    by_id = marks_of(item.id for item in study.configurations)
    return by_id if study.aa is None else {**by_id, study.aa: AA_MARK}


def marker_style(mark: Mark) -> dict[str, Any]:
    """A mark's point, as keywords of `Axes.plot` and `Line2D`."""
    face = mark.color if mark.filled else "white"
    return {"color": mark.color, "marker": mark.marker, "markerfacecolor": face}


@dataclass(frozen=True)
class Picture:
    """A drawn figure and the numbers in it: a row for each thing drawn, values as they are."""

    figure: Figure
    table: pd.DataFrame


def picture(
    figure: Figure, columns: Sequence[str], rows: Sequence[Mapping[str, object]]
) -> Picture:
    """The figure, laid out once for all its files, with its rows as a table of the columns."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    return Picture(figure, _table(columns, rows))


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object)


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as CSV; None is an empty field, floats keep every digit."""
    return _table(columns, rows).to_csv(index=False, lineterminator="\n")


def banner_text(study: StudyTables) -> str | None:
    """What stands under a figure that does not show a GPU's numbers; None for a real GPU."""
    if study.emulated:
        return "EMULATED: set costs, not vLLM"
    return None if study.engine_label == "real vLLM, GPU" else study.engine_label


def new_figure(
    study: StudyTables, width_in: float, height_in: float, notes: Sequence[str] = ()
) -> Figure:
    """An empty figure of that height over a footer: notes, the study's stamp, off the GPU a banner.

    What is drawn is laid out above the footer (`legend` too).
    """
    blocks = (
        "1 block, point estimates" if study.blocks == 1 else f"{study.blocks} blocks per config."
    )
    stamp = f"{study.name} · {study.engine_label} · {blocks}"
    return stamped_figure(stamp, banner_text(study), (width_in, height_in), notes)


def stamped_figure(
    stamp: str, banner: str | None, size_in: tuple[float, float], notes: Sequence[str] = ()
) -> Figure:
    """An empty figure over a footer: notes, a stamp, and a banner where there is one."""
    width_in, height_in = size_in
    room_in = width_in - 0.14
    lines = [line for note in (*notes, stamp) if note for line in _broken(note, room_in)]
    foot_in = LINE_IN * len(lines) + BANNER_IN * (banner is not None) + 0.06
    total_in = height_in + foot_in
    figure = Figure(figsize=(width_in, total_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    foot = foot_in / total_in
    engine.set(rect=(0, foot, 1, 1 - foot), w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.03)
    for number, line in enumerate(reversed(lines)):
        y_in = 0.05 + LINE_IN * number + BANNER_IN * (banner is not None)
        color = "black" if number else MUTED
        figure.text(0.07 / width_in, y_in / total_in, line, color=color, va="baseline")
    if banner:
        share = BANNER_IN / total_in
        figure.add_artist(Rectangle((0, 0), 1, share, color="#8a5a00", lw=0))
        figure.text(
            0.07 / width_in, share / 2, fitted(banner, room_in, 7.5 * 1.13), color="white",
            fontsize=7.5, fontweight="bold", va="center_baseline", gid="banner",
        )  # fmt: skip
    return figure


@contextmanager
def layout_held(figure: Figure) -> Iterator[None]:
    """Leave the layout for later: seaborn draws the whole figure to measure a heat map's labels."""
    engine = figure.get_layout_engine()
    figure.set_layout_engine("none")
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def legend(figure: Figure, handles: Sequence[Artist], columns: int) -> None:
    """What the marks mean, between the axes and the footer."""
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    total_in = figure.get_figheight()
    foot = engine.get()["rect"][1]
    above = foot + (LEGEND_IN * math.ceil(len(handles) / columns) + 0.06) / total_in
    engine.set(rect=(0, above, 1, 1 - above))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, foot), ncols=columns,
        handlelength=1.8, columnspacing=1.2, borderaxespad=0, borderpad=0.3, labelspacing=0.35,
    )  # fmt: skip


def configuration_handles(study: StudyTables, ids: Sequence[str]) -> list[Artist]:
    """Legend entries of configurations: line, marker and label."""
    by_id = marks(study)
    return [
        Line2D([], [], ls=by_id[item.id].line, label=fitted(item.label, LABEL_IN, TEXT_PT),
               **marker_style(by_id[item.id]))
        for item in study.launched
        if item.id in ids
    ]  # fmt: skip


@cache
def text_width_in(text: str, points: float) -> float:
    """Width in inches of one line of text in the figures' font."""
    font = get_font(findfont(FontProperties()))
    # Measured large: at the size of the text the hinting of single glyphs adds up.
    font.set_size(20 * points, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64 / 72 / 20


def fitted(text: str, width_in: float, points: float = TEXT_PT) -> str:
    """`text`, shortened with an ellipsis if it is wider than `width_in`."""
    if text_width_in(text, points) <= width_in:
        return text
    while text and text_width_in(text + "…", points) > width_in:
        text = text[:-1]
    return text.rstrip() + "…"


def _broken(text: str, width_in: float) -> list[str]:
    """`text` in lines of at most `width_in`."""
    if text_width_in(text, TEXT_PT) <= width_in:
        return [text]
    characters = int(len(text) * width_in / text_width_in(text, TEXT_PT))
    return [fitted(line, width_in) for line in textwrap.wrap(text, characters - 2)]


def absent(study: StudyTables, name: str, reason: str) -> Picture:
    """The picture that stands in for a figure that cannot be drawn, and says why."""
    figure = new_figure(study, COLUMN_IN, 1.1)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), 1, 1, **LOST))
    words = "\n".join(textwrap.wrap(reason, 56, break_long_words=True))
    axes.text(
        0.5, 0.5, f"{FIGURES[name].title}\nis absent from this study:\n{words}", ha="center",
        va="center", linespacing=1.35,
        bbox={"facecolor": "white", "edgecolor": "#b5b5b5", "pad": 5},
    )  # fmt: skip
    return picture(figure, ["absent_because"], [{"absent_because": reason}])


def save(picture: Picture, folder: Path, name: str, title: str = "") -> None:
    """Write `name`.png, .svg and .csv; equal pictures give equal bytes (no date, fixed ids).

    The title is that of the study's figure of this name, where none is given.
    """
    title = title or FIGURES[name].title
    for suffix, metadata in (
        ("png", {"Software": None, "Title": title}),
        ("svg", {"Date": None, "Creator": None, "Title": title}),
    ):
        stream = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": name}):
            picture.figure.savefig(stream, format=suffix, dpi=DPI, metadata=metadata)
        write_bytes(folder / f"{name}.{suffix}", stream.getvalue())
    write_text(folder / f"{name}.csv", picture.table.to_csv(index=False, lineterminator="\n"))
