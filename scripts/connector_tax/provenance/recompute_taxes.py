"""Taxes, their intervals and verdicts, and the hypotheses, a second time (METHOD.md; design).

Plain numpy over `recompute`; nothing is shared with connector_tax.analysis. A tax is
exp(mean over blocks of log(p_X / p_plain)) - 1; its interval is the wider of the hierarchical
bootstrap and Student's t on the blocks' values, both on the log ratio.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connector_tax.provenance.recompute import (
    Floats,
    Row,
    holm,
    named_generator,
    t_quantile,
    t_two_sided,
)

METRICS = ("ttft_p90", "tpot_p90", "ttft_p50", "tpot_p50", "e2e_p90")
VERDICT_BLOCKS = 3
NOOP, MOONCAKE, NIXL = "noop_connector", "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"

Sample = tuple[float, Floats, int]
Where = tuple[str, str, str]  # config, phase, cell
Key = tuple[str, int, str, str]  # config, block, phase, cell
Lost = tuple[str, int, str]  # status, block, reason


@dataclass(frozen=True)
class Effect:
    """A number with its interval; bounds are None where one chunk of one launch is all there is."""

    point: float
    lo: float | None
    hi: float | None
    method: str
    p: float | None
    n_blocks: int

    @property
    def low(self) -> float:
        """The lower bound, minus infinity if unknown."""
        return -math.inf if self.lo is None else self.lo

    @property
    def high(self) -> float:
        """The upper bound, infinity if unknown."""
        return math.inf if self.hi is None else self.hi

    def numbers(self) -> Row:
        """As hypotheses.json has an effect."""
        return {
            "point": self.point,
            "lo": self.lo,
            "hi": self.hi,
            "method": self.method,
            "n_blocks": self.n_blocks,
        }


def effect(point: float, per_block: Floats, replicates: Floats, confidence: float) -> Effect:
    """The wider of two intervals, and the larger of their p-values (from three blocks on)."""
    n, tail = len(per_block), (1 - confidence) / 2
    if n == 1 and len(replicates) > 1 and replicates.max() == replicates.min():
        return Effect(point, None, None, "none: one time-chunk in one launch", None, 1)
    lo, hi = float(np.quantile(replicates, tail)), float(np.quantile(replicates, 1 - tail))
    if n == 1:
        return Effect(point, lo, hi, "within-launch bootstrap", None, 1)
    error = float(per_block.std(ddof=1)) / math.sqrt(n)
    half, method = t_quantile(confidence, n - 1) * error, "hierarchical bootstrap"
    if 2 * half > hi - lo:
        lo, hi, method = point - half, point + half, "t on block values"
    p = None
    if n >= VERDICT_BLOCKS:
        fewer = min(int((replicates <= 0).sum()), int((replicates >= 0).sum()))
        by_resampling = min(1.0, 2 * (fewer + 1) / (len(replicates) + 1))
        by_t = (1.0 if point == 0 else 0.0) if error == 0 else t_two_sided(point / error, n - 1)
        p = max(by_resampling, by_t)
    return Effect(point, lo, hi, method, p, n)


class Taxes:
    """Every effect that can be formed from the samples of the valid cells."""

    def __init__(
        self,
        samples: Mapping[Key, Mapping[str, Sample]],
        statistics: Mapping[str, Any],
        seed: int,
        blocks: int,
    ) -> None:
        self.samples = samples
        self.statistics = statistics
        self.all_blocks = range(blocks)
        self._seed = seed

    def blocks(self, where: Where, metric: str) -> list[int]:
        """The blocks in which the configuration and plain both have the metric."""
        config, phase, cell = where
        return [
            b
            for b in self.all_blocks
            if all(metric in self.samples.get((c, b, phase, cell), {}) for c in (config, "plain"))
        ]

    def tax(self, where: Where, metric: str) -> Effect | None:
        """The tax of a configuration in a cell; None without a block that has it."""
        blocks = self.blocks(where, metric)
        if not blocks:
            return None
        points, replicates = self._ratios(blocks, where, metric)
        mean = float(points.mean())
        found = effect(mean, points, self._mean(points, replicates), self._confidence)
        lo, hi = (None if b is None else math.expm1(b) for b in (found.lo, found.hi))
        return Effect(math.expm1(mean), lo, hi, found.method, found.p, len(blocks))

    def combination(
        self, terms: Sequence[tuple[float, Where, str]], confidence: float | None = None
    ) -> Effect | None:
        """A weighted sum of taxes over the blocks that have all of them."""
        shared = [b for b in self.all_blocks if all(b in self.blocks(w, m) for _, w, m in terms)]
        if not shared:
            return None
        point, per_block, replicates = 0.0, np.zeros(len(shared)), np.zeros(0)
        for weight, where, metric in terms:
            points, resampled = self._ratios(shared, where, metric)
            point += weight * math.expm1(float(points.mean()))
            per_block = per_block + weight * np.expm1(points)
            part = weight * np.expm1(self._mean(points, resampled))
            replicates = part if replicates.size == 0 else replicates + part
        return effect(point, per_block, replicates, confidence or self._confidence)

    def point(self, where: Where, metric: str, blocks: Sequence[int]) -> float:
        """The tax over the given blocks."""
        return math.expm1(float(self._ratios(blocks, where, metric)[0].mean()))

    def absolute(self, where: Where, metric: str) -> tuple[float, float, Effect, int, int]:
        """plain (ms), configuration (ms), their difference (ms), and both sample sizes."""
        config, phase, cell = where
        blocks = self.blocks(where, metric)
        logs = {c: self._logs(blocks, (c, phase, cell), metric) for c in (config, "plain")}
        means = {c: math.exp(float(points.mean())) for c, (points, _) in logs.items()}
        spread = {c: np.exp(self._mean(*pair)) for c, pair in logs.items()}
        apart = effect(
            means[config] - means["plain"],
            np.exp(logs[config][0]) - np.exp(logs["plain"][0]),
            spread[config] - spread["plain"],
            self._confidence,
        )
        sizes = [
            sum(self.samples[c, b, phase, cell][metric][2] for b in blocks)
            for c in (config, "plain")
        ]
        return means["plain"], means[config], apart, sizes[0], sizes[1]

    @property
    def _confidence(self) -> float:
        return float(self.statistics["confidence"])

    def _logs(self, blocks: Sequence[int], where: Where, metric: str) -> tuple[Floats, Floats]:
        config, phase, cell = where
        found = [self.samples[config, b, phase, cell][metric] for b in blocks]
        return np.array([s[0] for s in found]), np.array([s[1] for s in found])

    def _ratios(self, blocks: Sequence[int], where: Where, metric: str) -> tuple[Floats, Floats]:
        _, phase, cell = where
        ours, plain = (self._logs(blocks, w, metric) for w in (where, ("plain", phase, cell)))
        return ours[0] - plain[0], ours[1] - plain[1]

    def _mean(self, points: Floats, replicates: Floats) -> Floats:
        """Resampled mean over blocks; within-launch deviations are divided by sqrt(blocks)."""
        blocks, resamples = replicates.shape
        rng = named_generator(f"{self._seed}/bootstrap/{blocks} blocks")
        draws = rng.integers(0, blocks, size=(resamples, blocks))
        total = np.zeros(resamples)
        for slot in range(blocks):
            # A block drawn twice contributes two different replicates.
            rows = (np.arange(resamples) + slot * (resamples // blocks)) % resamples
            drawn = draws[:, slot]
            away = (replicates[drawn, rows] - points[drawn]) / math.sqrt(blocks)
            total += points[drawn] + away
        mean: Floats = total / blocks
        return mean


def verdict(tax: Effect, p_holm: float | None, margin: float, confidence: float) -> str:
    """What the study says of a tax."""
    if tax.n_blocks < VERDICT_BLOCKS or p_holm is None:
        return "point estimate, no verdict"
    if -margin < tax.low and tax.high < margin:
        return "NO TAX"
    proven = p_holm < 1 - confidence and tax.point > 0 and tax.low > 0
    return "TAX" if proven else "INCONCLUSIVE"


def judge(family: Sequence[Row], effects: Sequence[Effect | None], settings: Row) -> None:
    """Add p_holm, verdict and the A/A comparison to the rows of one cell and metric."""
    tested = [r for r in family if r["p_value"] is not None and r["config"] != "plain_last"]
    for row, p in zip(tested, holm([r["p_value"] for r in tested]), strict=True):
        row["p_holm"] = p
    noise: Row = next((r for r in family if r["config"] == "plain_last"), {})
    for row, found in zip(family, effects, strict=True):
        if row["config"] == "plain_last":
            row["p_holm"] = row["p_value"]
        row |= {f"aa_{key}": noise.get(f"tax_{key}") for key in ("lo", "hi")}
        row["aa_tax"] = noise.get("tax")
        if found is not None:
            row["verdict"] = verdict(
                found, row["p_holm"], settings["margin"], settings["confidence"]
            )


# ---- hypotheses and criteria: identifier -> (verdict, numbers)

Finding = tuple[str, dict[str, Any]]
UNKNOWN: Finding = ("cannot tell", {})


def hypotheses(
    taxes: Taxes, limits: Row, safe_cell: str | None, shapes: Sequence[Row]
) -> dict[str, Finding]:
    """Verdict and effects of H1 to H6.

    Args:
        taxes: the effects.
        limits: the `hypotheses` section of the configuration.
        safe_cell: the Phase A cell at ref_safe; None where that rate is not in the grid.
        shapes: the planned cells of Phase B.
    """
    found = {f"H{n}": UNKNOWN for n in range(1, 7)}
    margin = taxes.statistics["margin"]
    found["H5"] = _growth(taxes, "ttft_p90", "input_tokens", "output_tokens", shapes, margin)
    found["H6"] = _growth(taxes, "tpot_p90", "output_tokens", "input_tokens", shapes, margin)
    if safe_cell is not None:
        for name, judged in (("H1", _h1), ("H2", _h2), ("H3", _h3), ("H4", _h4)):
            found[name] = judged(taxes, limits, safe_cell)
    return found


def _at(config: str, cell: str) -> Where:
    return (config, "A", cell)


def _decided(verdict_text: str, effects: Sequence[Effect], numbers: Row) -> Finding:
    few = min(e.n_blocks for e in effects) < VERDICT_BLOCKS
    return ("cannot tell" if few else verdict_text), numbers


def _h1(taxes: Taxes, limits: Row, cell: str) -> Finding:
    tax = taxes.tax(_at(MOONCAKE, cell), "ttft_p90")
    if tax is None:
        return UNKNOWN
    bound = limits["h1_min_tax"]
    said = "supported" if tax.low >= bound else "refuted" if tax.high < bound else "cannot tell"
    return _decided(said, [tax], {"tax_ttft_p90": tax.numbers()})


def _h2(taxes: Taxes, limits: Row, cell: str) -> Finding:
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


def gap_of(taxes: Taxes, cell: str) -> Effect | None:
    """tax(mooncake_both) - tax(nixl_both) on TTFT p90."""
    terms = [(1.0, _at(MOONCAKE, cell), "ttft_p90"), (-1.0, _at(NIXL, cell), "ttft_p90")]
    return taxes.combination(terms)


def share_of(taxes: Taxes, cell: str, share: float) -> Effect | None:
    """tax(noop) - share x tax(mooncake_both) on TTFT p90."""
    terms = [(1.0, _at(NOOP, cell), "ttft_p90"), (-share, _at(MOONCAKE, cell), "ttft_p90")]
    return taxes.combination(terms)


def _h3(taxes: Taxes, limits: Row, cell: str) -> Finding:
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


def _h4(taxes: Taxes, limits: Row, cell: str) -> Finding:
    tolerance = limits["h4_tolerance"]

    def combined(multi: float, parts: float) -> Effect | None:
        weights = ((multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))
        return taxes.combination([(w, _at(c, cell), "ttft_p90") for w, c in weights])

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


def _growth(
    taxes: Taxes, metric: str, axis: str, across: str, shapes: Sequence[Row], margin: float
) -> Finding:
    lengths = sorted({shape[axis] for shape in shapes})
    others = sorted({shape[across] for shape in shapes})
    if len(lengths) < 2:
        return UNKNOWN

    def change(a: int, b: int, confidence: float | None = None) -> Effect | None:
        terms = []
        for sign, length in ((1.0, b), (-1.0, a)):
            for other in others:
                pair = (length, other) if axis == "input_tokens" else (other, length)
                where = (MOONCAKE, "B", f"{pair[0]}x{pair[1]}")
                terms.append((sign / len(others), where, metric))
        return taxes.combination(terms, confidence)

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
    taxes: Taxes, limits: Row, safe_cell: str | None, found: Mapping[str, Finding]
) -> dict[int, tuple[str, str | None]]:
    """Verdict and label of criteria 1 to 5."""
    missing: tuple[str, str | None] = ("not met", None)
    result = dict.fromkeys(range(1, 6), missing)
    if found["H4"][1]:
        words = {"supported": "linear", "refuted": "not linear"}
        result[4] = ("met", words.get(found["H4"][0], "undecided"))
    if found["H5"][1] and found["H6"][1]:
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


def _band_label(found: Effect, low: float, high: float, inside: str, outside: str) -> str:
    if found.n_blocks < VERDICT_BLOCKS:
        return "undecided"
    if low <= found.low and found.high <= high:
        return inside
    return outside if found.high < low or found.low > high else "undecided"


def _cost_label(taxes: Taxes, limits: Row, cell: str) -> tuple[str, str | None]:
    noop, mooncake = (taxes.tax(_at(c, cell), "ttft_p90") for c in (NOOP, MOONCAKE))
    upper = share_of(taxes, cell, limits["h3_framework_share"])
    lower = share_of(taxes, cell, limits["h3_implementation_share"])
    if noop is None or mooncake is None or upper is None or lower is None:
        return "not met", None
    few = min(e.n_blocks for e in (noop, mooncake, upper, lower)) < VERDICT_BLOCKS
    if few or mooncake.low <= 0:
        return "met", "undecided"
    if upper.low >= 0:
        return "met", "framework-cost-dominated"
    if lower.high < 0:
        return "met", "implementation-cost-dominated"
    return "met", "mixed" if lower.low >= 0 and upper.high < 0 else "undecided"
