"""The figures of the study, in order: file name, what draws it, title and caption."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from connector_tax.figures.style import Picture
    from connector_tax.figures.tables import StudyTables


@dataclass(frozen=True)
class Words:
    """Module and function of this package that draw a figure, its title and caption."""

    drawn_by: str
    title: str
    caption: str


FIGURES: dict[str, Words] = {
    "fig1_ttft_vs_rate": Words(
        "rates.ttft",
        "Figure 1: TTFT p90 vs offered rate",
        "TTFT p90 against the offered rate in Phase A, above in milliseconds, below as the tax over"
        " plain, with 95 % intervals over the blocks. Strokes over a saturated point name the"
        " criteria that fired; the knee is the lowest saturated rate. The lower panel spans what"
        " is not saturated; an arrow at its edge stands for a point beyond it.",
    ),
    "fig2_tpot_vs_rate": Words(
        "rates.tpot",
        "Figure 2: TPOT p90 vs offered rate",
        "TPOT p90 against the offered rate in Phase A; otherwise as Figure 1.",
    ),
    "fig3_throughput": Words(
        "rates.throughput",
        "Figure 3: effective vs offered throughput, and what saturates",
        "Above, effective throughput against the offered rate in Phase A, and over the arrivals of"
        " the window, as the criterion has it; shaded, what counts as keeping up. Below, a stroke"
        " for each criterion of saturation that fired: rate (effective throughput over the"
        " arrivals of the window), queue (median of waiting requests), TTFT (p90 over"
        " that at half the rate). A frame marks the knee, the lowest saturated rate. A negative"
        " number counts the blocks that lost the cell. Hatched: no number.",
    ),
    "fig4_tax_bars": Words(
        "taxes.bars",
        "Figure 4: tax at the reference rates, and what queueing adds",
        "Filled the tax at ref_safe, hatched at ref_load, with 95 % intervals. At the right the gap"
        " between the two in percentage points: what queueing adds. A tax inside the grey band is"
        " not distinguishable from launching plain twice (A/A at ref_safe).",
    ),
    "fig5_shape_heatmap": Words(
        "taxes.heat_maps",
        "Figure 5: TTFT p90 tax by input and output length",
        "Tax on TTFT p90 in per cent by input and output length at ref_safe (Phase B), one map per"
        " configuration, all on one scale; exploratory taxes. Grey: an estimate smaller than the"
        " margin; a circle marks an interval that includes zero. The last map is the A/A"
        " comparison: what the colours of the others are worth.",
    ),
    "fig6_step_cdf": Words(
        "steps.distribution",
        "Figure 6: step duration at ref_safe",
        "Cumulative distribution, at ref_safe (Phase A), of schedule() and, where the records have"
        " it, of the whole engine step, over steps that scheduled tokens; empty polling steps are"
        " left out. Each curve is the mean of its launches' quantiles, plain's of all its launches."
        " The table gives plain's median and each other configuration's difference from it with its"
        " 95 % interval (step taxes: medians of launches, compared within blocks). The axes span"
        " the 1st to the 99th percentile.",
    ),
    "fig7_decomposition": Words(
        "steps.decomposition",
        "Figure 7: what a step costs at ref_safe, by kind of step",
        "What a step takes over plain's (diamond, with its 95 % interval; the number at the right),"
        " and the stack that adds up to it. Framework: the no-op connector's step over plain's."
        " Implementation: the connector's hooks over the no-op's. Left: what is in no hook. A"
        " configuration without a connector has the diamond alone. Means over the steps of a"
        " launch. The grey band is the A/A comparison.",
    ),
    "fig8_additivity": Words(
        "taxes.additivity",
        "Figure 8: additivity of stacked connectors at ref_safe",
        "Is the stacked connector's tax the sum of its parts' taxes (H4)? Taxes of both parts, of"
        " their sum and of the stack at ref_safe, with 95 % intervals; the sum's interval adds the"
        " ends of its parts' intervals and so is conservative. The dotted"
        " bracket is the tolerance around the stack's tax within which the sum counts as additive.",
    ),
    "fig9_forest": Words(
        "taxes.forest",
        "Figure 9: taxes at ref_safe with intervals and verdicts",
        "Taxes with the 95 % interval of their verdicts, on a scale of log ratios; grey the A/A"
        " band, dotted the margin fixed beforehand. An open triangle marks a cell in which a server"
        " was saturated or dropped arrivals: no verdict, and an interval of this tax alone, not"
        " widened for the configurations together. Open diamonds are the prior, a trace"
        " replay on eight coupled, saturated instances.",
    ),
    "fig10_resources": Words(
        "resources.resources",
        "Figure 10: resources an idle connector takes",
        "Resources of each configuration minus plain's, from the launches of Phase A, with 95 %"
        " intervals. CPU is that of the ready server without a request, and per"
        " 1,000 requests at ref_safe; memory (PSS, companions included) before the first request;"
        " start-up until it is ready. A count without an interval was the same in every launch."
        " Grey: the A/A band. Right of each panel the difference, above it plain's own value.",
    ),
    "scorecard": Words(
        "resources.scorecard",
        "Scorecard",
        "What each configuration costs over plain: latency over all rates with its verdict and"
        " the upper end of its interval, a step at the rate named, and what it takes while idle.",
    ),
}
NAMES = tuple(FIGURES)


def draw(study: StudyTables, name: str) -> Picture:
    """Return the picture of a figure with its numbers; where it cannot be drawn, one with the
    reason.
    """
    from connector_tax.figures import style

    words = FIGURES[name]
    try:
        picture: Picture = pkgutil.resolve_name(f"{__package__}.{words.drawn_by}")(study)
    except style.AbsentError as reason:
        picture = style.absent(study, words.title, str(reason))
    return replace(picture, title=words.title)
