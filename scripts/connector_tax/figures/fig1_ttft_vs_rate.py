"""Figure 1: TTFT p90 against the offered rate, and its tax (Phase A)."""

from connector_tax.figures import rates
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables


def draw(study: StudyTables) -> Picture:
    """TTFT p90 in ms over its tax, one rate axis."""
    return rates.latency_figure(study, "ttft_p90")
