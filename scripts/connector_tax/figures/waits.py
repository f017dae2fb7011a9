"""Where a difference of TTFT is of the arrivals: other waits for the step with the prompt."""

from connector_tax.artifacts.metrics import margin_of
from connector_tax.artifacts.tables import TAX, WAIT
from connector_tax.figures.tables import StudyTables
from connector_tax.text import signed


def words(study: StudyTables) -> str:
    """Which configurations' requests of Phase B wait otherwise than plain's; empty: none.

    Their interval is off zero, and they make more of the TTFT than its margin.
    """
    margin = margin_of(study.settings["statistics"]["margins"], "ttft_p50")
    ttft = {(r.config, r.cell): r.base for r in study.of(TAX, "B") if r.metric == "ttft_p50"}
    found: dict[str, list[str]] = {}
    for row in study.of(WAIT, "B"):
        base = ttft.get((row.config, row.cell))
        if row.config == study.aa or None in (row.lo, row.hi, base):
            continue
        assert row.estimate is not None
        assert row.lo is not None
        assert row.hi is not None
        assert base is not None
        if not row.lo <= 0 <= row.hi and abs(row.estimate) > margin * base:
            told = f"{signed(row.estimate, 2)} ms at {row.cell}"
            found.setdefault(study.label(row.config), []).append(told)
    if not found:
        return ""
    own = "; ".join(f"{label} {', '.join(cells)}" for label, cells in found.items())
    return (
        f"Waits for the step with the prompt differ, which is of the arrivals, not the tax: {own}"
    )
