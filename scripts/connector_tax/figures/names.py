"""The figures in order: file name, drawing function, title. Captions are in captions/."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector_tax.figures.style import Picture
    from connector_tax.figures.tables import StudyTables


CAPTIONS = Path(__file__).with_name("captions")


@dataclass(frozen=True)
class Words:
    """Module and function that draw a figure, and the figure's title."""

    drawn_by: str
    title: str


FIGURES: dict[str, Words] = {
    "fig1_ttft_vs_rate": Words("rates.ttft", "Figure 1: TTFT p90 vs offered rate"),
    "fig2_tpot_vs_rate": Words("rates.tpot", "Figure 2: TPOT p90 vs offered rate"),
    "fig3_throughput": Words(
        "rates.throughput", "Figure 3: effective vs offered throughput, and what saturates"
    ),
    "fig4_tax_bars": Words(
        "taxes.bars", "Figure 4: tax at the reference rates, and what queueing adds"
    ),
    "fig5_shape_heatmap": Words(
        "taxes.heat_maps", "Figure 5: TTFT p90 tax by input and output length"
    ),
    "fig6_step_cdf": Words("steps.distribution", "Figure 6: step duration at ref_safe"),
    "fig7_decomposition": Words(
        "steps.decomposition", "Figure 7: what a step costs at ref_safe, by kind of step"
    ),
    "fig8_additivity": Words(
        "taxes.additivity", "Figure 8: additivity of stacked connectors at ref_safe"
    ),
    "fig9_forest": Words("taxes.forest", "Figure 9: taxes at ref_safe with intervals and verdicts"),
    "fig10_resources": Words("resources.resources", "Figure 10: resources an idle connector takes"),
    "scorecard": Words("resources.scorecard", "Scorecard"),
}
NAMES = tuple(FIGURES)


def caption(name: str) -> str:
    """Return a figure's caption as one line; `snakemake --report` reads the same file."""
    return " ".join((CAPTIONS / f"{name}.rst").read_text(encoding="utf-8").split())


def draw(study: StudyTables, name: str) -> Picture:
    """Return the picture of a figure, or a picture with the reason if it cannot be drawn."""
    from connector_tax.figures import style

    words = FIGURES[name]
    try:
        figure = pkgutil.resolve_name(f"{__package__}.{words.drawn_by}")(study)
    except style.AbsentError as reason:
        return style.absent(study, words.title, str(reason))
    return style.Picture(figure, words.title)
