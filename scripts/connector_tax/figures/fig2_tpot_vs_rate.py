"""Figure 2: TPOT p90 against the offered rate, and its tax (Phase A)."""

from connector_tax.figures import rates
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables


def draw(study: StudyTables) -> Picture:
    """TPOT p90 in ms over its tax, one rate axis."""
    return rates.latency_figure(study, "tpot_p90")
