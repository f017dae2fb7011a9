"""Figure 1: TTFT p90 against the offered rate, per configuration (Phase A)."""

from connector_tax.figures import rates
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 1: TTFT p90 vs offered rate"
CAPTION = (
    "TTFT p90 against the offered rate in Phase A, with 95 % intervals over the blocks (of one "
    "block: within one launch; launches not included); both axes are logarithmic. Points of "
    "different configurations are set slightly apart sideways so that none hides another. A cross "
    "marks a saturated point; the rows below say, by slot, which of the three criteria fired, name "
    "each configuration's knee (the lowest saturated rate), and show cells that have no number."
)
QUANTITY = rates.Quantity(
    label="TTFT p90 (ms)",
    unit="ms",
    value=lambda row: row.ttft_p90_ms,
    low=lambda row: row.ttft_p90_lo_ms,
    high=lambda row: row.ttft_p90_hi_ms,
    log=True,
)


def draw(study: StudyTables) -> Picture:
    """TTFT p90 with 95 % intervals, logarithmic on both axes."""
    return rates.curves(study, QUANTITY)
