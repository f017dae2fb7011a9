"""Figure 2: TPOT p90 against the offered rate, per configuration (Phase A)."""

from connector_tax.figures import rates
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables

TITLE = "Figure 2: TPOT p90 vs offered rate"
CAPTION = (
    "TPOT p90 against the offered rate in Phase A, with 95 % intervals over the blocks (of one "
    "block: within one launch; launches not included); the rate axis is logarithmic, the TPOT axis "
    "linear. Marks as in Figure 1."
)
QUANTITY = rates.Quantity(
    label="TPOT p90 (ms)",
    unit="ms",
    value=lambda row: row.tpot_p90_ms,
    low=lambda row: row.tpot_p90_lo_ms,
    high=lambda row: row.tpot_p90_hi_ms,
    log=False,
)


def draw(study: StudyTables) -> Picture:
    """TPOT p90 with 95 % intervals; linear, because the spread is a fraction, not decades."""
    return rates.curves(study, QUANTITY)
