"""H1 to H6 and the success criteria a second time, from recomputed taxes (docs/method.md)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from connector_tax.artifacts.study_records import CellPlan, HypothesesSection
from connector_tax.provenance.blocks_wanted import Ahead
from connector_tax.provenance.recompute import Row
from connector_tax.provenance.recompute_taxes import MOST_BLOCKS, Taxes, TaxEstimate, Where

NOOP, MOONCAKE, NIXL = "noop_connector", "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"

# identifier -> (verdict, numbers)
Finding = tuple[str, dict[str, Any]]
UNKNOWN: Finding = ("cannot tell", {})


def hypotheses(
    taxes: Taxes, limits: HypothesesSection, safe_cell: str | None, shapes: Sequence[CellPlan]
) -> dict[str, Finding]:
    """Verdict and effects of H1 to H6; where more blocks would decide, their number.

    Args:
        taxes: the effects.
        limits: the `hypotheses` section of the configuration.
        safe_cell: the Phase A cell at ref_safe; None where that rate is not in the grid.
        shapes: the planned cells of Phase B.
    """
    findings = _findings(taxes, limits, safe_cell, shapes)
    wanting = {name for name, (_, numbers) in findings.items() if "blocks_needed" in numbers}
    ahead = Ahead(taxes)
    while wanting and ahead.blocks < MOST_BLOCKS:
        ahead.blocks += 1
        later = _findings(ahead, limits, safe_cell, shapes)
        for name in [name for name in wanting if later[name][0] != "cannot tell"]:
            findings[name][1]["blocks_needed"] = ahead.blocks
            wanting.remove(name)
    return findings


def _findings(
    taxes: Taxes, limits: HypothesesSection, safe_cell: str | None, shapes: Sequence[CellPlan]
) -> dict[str, Finding]:
    findings = {f"H{n}": UNKNOWN for n in range(1, 7)}
    findings["H5"] = _growth(taxes, "ttft_p90", "input_tokens", "output_tokens", shapes)
    findings["H6"] = _growth(taxes, "tpot_p90", "output_tokens", "input_tokens", shapes)
    if safe_cell is not None:
        for name, judged in (("H1", _h1), ("H2", _h2), ("H3", _h3), ("H4", _h4)):
            findings[name] = judged(taxes, limits, safe_cell)
    stack = (MULTI, MOONCAKE, LMCACHE)
    about = {"H2": (MOONCAKE, NIXL), "H3": (NOOP, MOONCAKE), "H4": stack}
    # Nothing is said of the configuration that taxes are against.
    return {
        name: UNKNOWN if taxes.baseline in about.get(name, (MOONCAKE,)) else finding
        for name, finding in findings.items()
    }


def _at(config: str, cell: str) -> Where:
    return (config, "A", cell)


def _decided(verdict_text: str, effects: Sequence[TaxEstimate], numbers: Row) -> Finding:
    if any(effect.undecided for effect in effects):
        return "cannot tell", numbers
    if verdict_text == "cannot tell":
        numbers["blocks_needed"] = None
    return verdict_text, numbers


def _h1(taxes: Taxes, limits: HypothesesSection, cell: str) -> Finding:
    tax = taxes.tax(_at(MOONCAKE, cell), "ttft_p90")
    if tax is None:
        return UNKNOWN
    bound = limits["h1_min_tax"]
    said = "supported" if tax.low >= bound else "refuted" if tax.high < bound else "cannot tell"
    return _decided(said, [tax], {"tax_ttft_p90": tax.numbers()})


def _h2(taxes: Taxes, limits: HypothesesSection, cell: str) -> Finding:
    gap = gap_of(taxes, cell)
    if gap is None:
        return UNKNOWN
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    said = "cannot tell"
    if low <= gap.low and gap.high <= high:
        said = "supported"
    elif gap.high < low or gap.low > high:
        said = "refuted"
    return _decided(said, [gap], {"gap": gap.numbers()})


def gap_of(taxes: Taxes, cell: str) -> TaxEstimate | None:
    """tax(mooncake_both) - tax(nixl_both) on TTFT p90."""
    return taxes.combination([(1.0, _at(MOONCAKE, cell)), (-1.0, _at(NIXL, cell))], "ttft_p90")


def share_of(taxes: Taxes, cell: str, share: float) -> TaxEstimate | None:
    """tax(noop) - share x tax(mooncake_both) on TTFT p90."""
    return taxes.combination([(1.0, _at(NOOP, cell)), (-share, _at(MOONCAKE, cell))], "ttft_p90")


def _h3(taxes: Taxes, limits: HypothesesSection, cell: str) -> Finding:
    split = share_of(taxes, cell, limits["h3_framework_share"])
    mooncake, noop = (taxes.tax(_at(c, cell), "ttft_p90") for c in (MOONCAKE, NOOP))
    if split is None or mooncake is None or noop is None:
        return UNKNOWN
    said = "cannot tell"
    if mooncake.low > 0:
        said = "supported" if split.high < 0 else "refuted" if split.low >= 0 else "cannot tell"
    numbers = {
        "noop_tax": noop.numbers(),
        "mooncake_tax": mooncake.numbers(),
        "framework_share": noop.point / mooncake.point if mooncake.point > 0 else None,
        "noop_minus_share_of_mooncake": split.numbers(),
    }
    return _decided(said, [split, mooncake], numbers)


def _h4(taxes: Taxes, limits: HypothesesSection, cell: str) -> Finding:
    tolerance = limits["h4_tolerance"]

    def combined(multi: float, parts: float) -> TaxEstimate | None:
        weights = ((multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))
        return taxes.combination([(w, _at(c, cell)) for w, c in weights], "ttft_p90")

    multi, mooncake, lmcache = (
        taxes.tax(_at(c, cell), "ttft_p90") for c in (MULTI, MOONCAKE, LMCACHE)
    )
    not_super, not_sub, excess = (
        combined(tolerance - 1, 1), combined(1 + tolerance, -1), combined(1, -1)
    )  # fmt: skip
    if not (multi and mooncake and lmcache and not_super and not_sub and excess):
        return UNKNOWN
    parts = mooncake.point + lmcache.point
    said = "cannot tell"
    if multi.low > 0 and not_super.low >= 0 and not_sub.low >= 0:
        said = "supported"
    elif multi.low > 0 and (not_super.high < 0 or not_sub.high < 0):
        said = "refuted"
    numbers = {
        "multi_tax": multi.numbers(),
        "mooncake_tax": mooncake.numbers(),
        "lmcache_tax": lmcache.numbers(),
        "multi_minus_sum": excess.numbers(),
        "relative_departure": abs(multi.point - parts) / multi.point if multi.point > 0 else None,
    }
    return _decided(said, [multi, not_super, not_sub], numbers)


Axis = Literal["input_tokens", "output_tokens"]


def _growth(
    taxes: Taxes, metric: str, axis: Axis, across: Axis, shapes: Sequence[CellPlan]
) -> Finding:
    margin = taxes.statistics["margins"][metric]
    lengths = sorted({shape[axis] for shape in shapes})
    others = sorted({shape[across] for shape in shapes})
    if len(lengths) < 2:
        return UNKNOWN

    def change(a: int, b: int, confidence: float | None = None) -> TaxEstimate | None:
        terms = []
        for sign, length in ((1.0, b), (-1.0, a)):
            for other in others:
                pair = (length, other) if axis == "input_tokens" else (other, length)
                where = (MOONCAKE, "B", f"{pair[0]}x{pair[1]}")
                terms.append((sign / len(others), where))
        return taxes.combination(terms, metric, confidence)

    pairs = list(itertools.pairwise(lengths))
    corrected = 1 - (1 - taxes.statistics["confidence"]) / len(pairs)
    steps = [e for pair in pairs if (e := change(*pair)) is not None]
    strict = [e for pair in pairs if (e := change(*pair, corrected)) is not None]
    whole = change(lengths[0], lengths[-1])
    if whole is None or len(steps) + len(strict) < 2 * len(pairs):
        return UNKNOWN
    said = "cannot tell"
    if all(step.low > 0 for step in steps):
        said = "supported"
    elif any(step.high < 0 for step in strict) or whole.high < margin:
        said = "refuted"
    numbers = {
        "steps": [step.numbers() for step in steps],
        "whole": whole.numbers(),
        "per_doubling": whole.point / math.log2(lengths[-1] / lengths[0]),
    }
    return _decided(said, [whole, *steps], numbers)


def labels(
    taxes: Taxes, limits: HypothesesSection, safe_cell: str | None, findings: Mapping[str, Finding]
) -> dict[int, tuple[str, str | None]]:
    """Verdict and label of criteria 1 to 5."""
    missing: tuple[str, str | None] = ("not met", None)
    result = dict.fromkeys(range(1, 6), missing)
    if findings["H4"][1]:
        words = {"supported": "linear", "refuted": "not linear"}
        result[4] = ("met", words.get(findings["H4"][0], "undecided"))
    if findings["H5"][1] and findings["H6"][1]:
        result[5] = ("met", None)
    if safe_cell is None:
        return result
    low, high = limits["h1_prior_band"]
    tax = taxes.tax(_at(MOONCAKE, safe_cell), "ttft_p90")
    if tax is not None:
        result[1] = ("met", _band_label(tax, low, high, "accepted", "revised"))
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    gap = gap_of(taxes, safe_cell)
    if gap is not None:
        result[2] = ("met", _band_label(gap, low, high, "agrees", "disagrees"))
    result[3] = _cost_label(taxes, limits, safe_cell)
    return result


def _band_label(effect: TaxEstimate, low: float, high: float, inside: str, outside: str) -> str:
    if effect.undecided:
        return "undecided"
    if low <= effect.low and effect.high <= high:
        return inside
    return outside if effect.high < low or effect.low > high else "undecided"


def _cost_label(taxes: Taxes, limits: HypothesesSection, cell: str) -> tuple[str, str | None]:
    noop, mooncake = (taxes.tax(_at(c, cell), "ttft_p90") for c in (NOOP, MOONCAKE))
    upper = share_of(taxes, cell, limits["h3_framework_share"])
    lower = share_of(taxes, cell, limits["h3_implementation_share"])
    if noop is None or mooncake is None or upper is None or lower is None:
        return "not met", None
    if any(e.undecided for e in (noop, mooncake, upper, lower)) or mooncake.low <= 0:
        return "met", "undecided"
    if upper.low >= 0:
        return "met", "framework-cost-dominated"
    if lower.high < 0:
        return "met", "implementation-cost-dominated"
    return "met", "mixed" if lower.low >= 0 and upper.high < 0 else "undecided"
