"""H1 to H6 of the design, each a function from the tables to a verdict, its numbers and a sentence.

Source: design, "Hypotheses". Thresholds come from the configuration. Supported when the whole
interval is on the hypothesis' side, refuted when the whole interval is on the other, else cannot
tell; where more blocks would tell, their number stands beside (docs/method.md, "Verdicts").
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from connector_tax.analysis.blocks_needed import MOST_BLOCKS, fewest_blocks
from connector_tax.analysis.conclusions import (
    CANNOT_TELL,
    REFUTED,
    SUPPORTED,
    Conclusion,
    decided,
    no_number,
    numbers_of,
    shown,
)
from connector_tax.analysis.effects import Effect, WeightedTax
from connector_tax.analysis.taxes import Tables
from connector_tax.text import signed

NOOP, MOONCAKE, NIXL = "noop_connector", "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"


def at_safe(tables: Tables) -> str | None:
    """The Phase A cell at ref_safe."""
    return tables.cell_at("ref_safe")


def h1(tables: Tables) -> Conclusion:
    """The tax persists at a single instance: TTFT p90 of mooncake_both at least h1_min_tax."""
    cell, bound = at_safe(tables), tables.study.config["hypotheses"]["h1_min_tax"]
    if cell is None:
        return _off_grid("H1")
    tax = tables.taxes.tax(MOONCAKE, "A", cell, "ttft_p90")
    if tax is None:
        return no_number("H1", tables, (MOONCAKE, "A", cell, "ttft_p90"))
    band = tables.study.config["hypotheses"]["h1_prior_band"]
    engine = tables.study.document["engine_label"]
    numbers = {"tax_ttft_p90": numbers_of(tax), "min_tax": bound}
    start = f"TTFT p90 of {MOONCAKE} at ref_safe is {shown(tax)} against {tables.study.baseline}"
    verdict, tail = CANNOT_TELL, f"the interval holds {bound:.0%}, the least the hypothesis asks."
    if tax.lo >= bound:
        verdict, tail = SUPPORTED, f"at least {bound:.0%}: on {engine} a single instance has it."
    elif tax.hi < bound:
        verdict, tail = (
            REFUTED,
            f"below {bound:.0%}: on {engine} the prior's tax is not there.",
        )
    label = _place(tax.point, band, f"the {100 * band[0]:g} to {100 * band[1]:g}% band")
    return decided("H1", verdict, start, tail, numbers, [tax], label)


def h2(tables: Tables) -> Conclusion:
    """The gap between Mooncake and NIXL is preserved: inside h2_gap_band_pp."""
    cell, limits = at_safe(tables), tables.study.config["hypotheses"]
    if cell is None:
        return _off_grid("H2")
    gap = gap_pp(tables, cell)
    if gap is None:
        wheres = [(config, "A", cell, "ttft_p90") for config in (MOONCAKE, NIXL)]
        return no_number("H2", tables, *wheres)
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    engine = tables.study.document["engine_label"]
    band = f"{100 * low:g} to {100 * high:g} pp"
    numbers = {
        "gap": numbers_of(gap),
        "band_pp": limits["h2_gap_band_pp"],
        "prior_gap_pp": limits["h2_prior_gap_pp"],
    }
    start = f"The TTFT p90 tax of {MOONCAKE} exceeds that of {NIXL} by {shown(gap, 'pp')}"
    verdict, tail = CANNOT_TELL, f"the interval crosses a border of the band {band}."
    if low <= gap.lo and gap.hi <= high:
        verdict, tail = SUPPORTED, f"inside {band}: on {engine} a single instance has the gap."
    elif gap.hi < 0:
        verdict, tail = REFUTED, f"the gap is inverted: on {engine} that of the prior is not there."
    elif gap.hi < low:
        verdict, tail = REFUTED, f"below {band}: on {engine} the gap of the prior is not there."
    elif gap.lo > high:
        verdict, tail = REFUTED, f"above {band}: on {engine} the gap is larger than the prior's."
    label = _place(gap.point, (low, high), f"the {band} band")
    return decided("H2", verdict, start, tail, numbers, [gap], label)


def at_rate(cell: str, *weights: tuple[float, str]) -> list[WeightedTax]:
    """A combination of the TTFT p90 taxes of several configurations in a Phase A cell."""
    return [WeightedTax(weight, config, "A", cell, "ttft_p90") for weight, config in weights]


def gap_pp(tables: Tables, cell: str) -> Effect | None:
    """tax(mooncake_both) - tax(nixl_both) of TTFT p90 in a Phase A cell, as a fraction."""
    return tables.taxes.combination(at_rate(cell, (1, MOONCAKE), (-1, NIXL)))


def h3(tables: Tables) -> Conclusion:
    """The framework is less than h3_framework_share of the Mooncake tax.

    noop < share x mooncake is read off the interval of noop - share x mooncake: a ratio of two
    taxes has no usable interval when the lower one may be zero.
    """
    cell, share = at_safe(tables), tables.study.config["hypotheses"]["h3_framework_share"]
    if cell is None:
        return _off_grid("H3")
    split = framework_share(tables, cell, share)
    mooncake = tables.taxes.tax(MOONCAKE, "A", cell, "ttft_p90")
    noop = tables.taxes.tax(NOOP, "A", cell, "ttft_p90")
    if split is None or mooncake is None or noop is None:
        return no_number("H3", tables, *((c, "A", cell, "ttft_p90") for c in (NOOP, MOONCAKE)))
    numbers = {
        "noop_tax": numbers_of(noop),
        "mooncake_tax": numbers_of(mooncake),
        "framework_share": noop.point / mooncake.point if mooncake.point > 0 else None,
        "noop_minus_share_of_mooncake": numbers_of(split),
        "share": share,
    }
    start = f"The no-op connector costs {shown(noop)} TTFT p90, {MOONCAKE} {shown(mooncake)}"
    verdict, tail = CANNOT_TELL, f"the interval of the difference to {share:.0%} of it holds zero."
    if mooncake.lo <= 0:
        tail = f"the tax of {MOONCAKE} may be zero, and there is nothing to split."
    elif split.hi < 0:
        verdict, tail = SUPPORTED, f"the framework is less than {share:.0%} of the tax."
    elif split.lo >= 0:
        verdict, tail = REFUTED, f"the framework is at least {share:.0%} of the tax."
    label = dominance(tables, noop.point, mooncake.point)
    return decided("H3", verdict, start, tail, numbers, [split, mooncake], label)


def dominance(tables: Tables, noop: float, mooncake: float) -> str:
    """What the design calls a share of the no-op's tax in the Mooncake tax."""
    limits = tables.study.config["hypotheses"]
    if mooncake <= 0:
        return "no tax to split"
    if noop >= limits["h3_framework_share"] * mooncake:
        return "framework-dominated"
    if noop < limits["h3_implementation_share"] * mooncake:
        return "implementation-dominated"
    return "mixed"


def framework_share(tables: Tables, cell: str, share: float) -> Effect | None:
    """tax(noop) - share x tax(mooncake_both) of TTFT p90 in a Phase A cell."""
    return tables.taxes.combination(at_rate(cell, (1, NOOP), (-share, MOONCAKE)))


def h4(tables: Tables) -> Conclusion:
    """The stacked connector's tax is the sum of its parts', within h4_tolerance of itself.

    |multi - sum| <= tolerance x multi is two linear statements, each with its own interval:
    sum - (1 - tolerance) multi >= 0 (not super-additive) and (1 + tolerance) multi - sum >= 0 (not
    sub-additive).
    """
    cell, tolerance = at_safe(tables), tables.study.config["hypotheses"]["h4_tolerance"]
    if cell is None:
        return _off_grid("H4")

    def combined(multi: float, parts: float) -> Effect | None:
        weights = ((multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))
        return tables.taxes.combination(at_rate(cell, *weights))

    wheres = [(config, "A", cell, "ttft_p90") for config in (MULTI, MOONCAKE, LMCACHE)]
    taxes = [tables.taxes.tax(*where) for where in wheres]
    not_super, not_sub = combined(tolerance - 1, 1), combined(1 + tolerance, -1)
    excess = combined(1, -1)
    multi, mooncake, lmcache = taxes
    if not (multi and mooncake and lmcache and not_super and not_sub and excess):
        return no_number("H4", tables, *wheres)
    parts = mooncake.point + lmcache.point
    relative = abs(multi.point - parts) / multi.point if multi.point > 0 else None
    numbers = {
        "multi_tax": numbers_of(multi),
        "mooncake_tax": numbers_of(mooncake),
        "lmcache_tax": numbers_of(lmcache),
        "multi_minus_sum": numbers_of(excess),
        "relative_departure": relative,
        "tolerance": tolerance,
    }
    start = (
        f"The stacked connector costs {shown(multi)} TTFT p90 against {signed(100 * parts, 1)}%"
        f" for the sum of its parts, apart by {shown(excess, 'pp')}"
    )
    verdict, tail = CANNOT_TELL, f"the interval crosses a border of the {tolerance:.0%} tolerance."
    if multi.lo <= 0:
        tail = "its tax may be zero, and there is nothing to add up."
    elif not_super.lo >= 0 and not_sub.lo >= 0:
        verdict, tail = SUPPORTED, f"additive within {tolerance:.0%}."
    elif not_super.hi < 0:
        verdict, tail = REFUTED, "super-additive: the connectors interfere."
    elif not_sub.hi < 0:
        verdict, tail = REFUTED, "sub-additive: a cost is shared."
    label = _additivity(multi.point, parts, tolerance)
    return decided("H4", verdict, start, tail, numbers, [multi, not_super, not_sub], label)


def _additivity(multi: float, parts: float, tolerance: float) -> str:
    if multi <= 0:
        return "no tax to add up"
    if abs(multi - parts) <= tolerance * multi:
        return "additive"
    return "super-additive" if multi > parts else "sub-additive"


Axis = Literal["input_tokens", "output_tokens"]


def h5(tables: Tables) -> Conclusion:
    """The TTFT p90 tax of mooncake_both grows with the input length."""
    return _growth("H5", tables, "ttft_p90", "input_tokens", "output_tokens")


def h6(tables: Tables) -> Conclusion:
    """The TPOT p90 tax of mooncake_both grows with the output length."""
    return _growth("H6", tables, "tpot_p90", "output_tokens", "input_tokens")


def _growth(identifier: str, tables: Tables, metric: str, axis: Axis, across: Axis) -> Conclusion:
    """Whether a tax grows along one axis of Phase B, averaged over the other.

    Supported: every step from one length to the next is positive (all intervals above zero need no
    correction: each must hold). Refuted: some step is negative, at a level corrected for the number
    of steps, or the growth over the whole axis is below the margin.
    """
    lengths = sorted({cell[axis] for cell in tables.study.cells("B")})
    others = sorted({cell[across] for cell in tables.study.cells("B")})
    statistics = tables.study.config["statistics"]
    if len(lengths) < 2:
        sentence = f"Cannot tell: Phase B has a single length of {axis.replace('_', ' ')}."
        return Conclusion(identifier, CANNOT_TELL, sentence, {})

    def change(a: int, b: int, confidence: float | None = None) -> Effect | None:
        terms = [
            WeightedTax(sign / len(others), MOONCAKE, "B", _shape(axis, length, other), metric)
            for sign, length in ((1.0, b), (-1.0, a))
            for other in others
        ]
        return tables.taxes.combination(terms, confidence)

    pairs = list(itertools.pairwise(lengths))
    corrected = 1 - (1 - statistics["confidence"]) / len(pairs)
    steps = [change(*pair) for pair in pairs]
    strict = [change(*pair, corrected) for pair in pairs]
    whole = change(lengths[0], lengths[-1])
    known = [effect for effect in (*steps, *strict) if effect is not None]
    if whole is None or len(known) < 2 * len(pairs):
        shapes = [_shape(axis, length, other) for length in lengths for other in others]
        return no_number(identifier, tables, *((MOONCAKE, "B", s, metric) for s in shapes))
    done, cautious = known[: len(pairs)], known[len(pairs) :]
    name = f"{metric.replace('_', ' ').upper().replace('P90', 'p90')} tax of {MOONCAKE}"
    noun = axis.replace("_tokens", "")
    numbers = {
        "lengths": lengths,
        "steps": [numbers_of(effect) for effect in done],
        "whole": numbers_of(whole),
        "per_doubling": whole.point / math.log2(lengths[-1] / lengths[0]),
        "sign": "+" if whole.point > 0 else "-" if whole.point < 0 else "0",
    }
    start = (
        f"From {lengths[0]} to {lengths[-1]} {noun} tokens the {name} changes by"
        f" {shown(whole, 'pp')}"
    )
    verdict, tail = CANNOT_TELL, "at least one step's interval holds zero."
    if all(step.lo > 0 for step in done):
        verdict, tail = SUPPORTED, f"it grows at every step of the {noun} length."
    elif any(step.hi < 0 for step in cautious):
        verdict, tail = REFUTED, f"it falls at a step of the {noun} length."
    elif whole.hi < statistics["margins"][metric]:
        margin = statistics["margins"][metric]
        verdict, tail = REFUTED, f"no growth beyond the margin of {margin:.0%}."
    label = {"+": "grows", "-": "falls", "0": "does not change"}[str(numbers["sign"])]
    label = f"{label} with {noun} length"
    return decided(identifier, verdict, start, tail, numbers, [whole, *done], label)


def _shape(axis: str, length: int, other: int) -> str:
    return f"{length}x{other}" if axis == "input_tokens" else f"{other}x{length}"


def _off_grid(identifier: str) -> Conclusion:
    sentence = "Cannot tell: ref_safe is not a rate of Phase A."
    return Conclusion(identifier, CANNOT_TELL, sentence, {})


def _place(value: float, band: Sequence[float], name: str) -> str:
    low, high = band
    where = "below" if value < low else "above" if value > high else "inside"
    return f"{where} {name}"


HYPOTHESES: Mapping[str, tuple[Callable[[Tables], Conclusion], tuple[str, ...]]] = {
    "H1": (h1, (MOONCAKE,)),
    "H2": (h2, (MOONCAKE, NIXL)),
    "H3": (h3, (NOOP, MOONCAKE)),
    "H4": (h4, (MULTI, MOONCAKE, LMCACHE)),
    "H5": (h5, (MOONCAKE,)),
    "H6": (h6, (MOONCAKE,)),
}


def findings(tables: Tables) -> list[Conclusion]:
    """What the study says about each hypothesis; nothing of one about its own baseline."""
    baseline = tables.study.baseline
    none = f"Cannot tell: taxes are against {baseline} here, which it is about."
    return [
        Conclusion(name, CANNOT_TELL, none, {}) if baseline in about else _judged(judge, tables)
        for name, (judge, about) in HYPOTHESES.items()
    ]


def _judged(judge: Callable[[Tables], Conclusion], tables: Tables) -> Conclusion:
    """The finding; where only its intervals are too wide, with the blocks that would decide it."""
    finding = judge(tables)
    if "blocks_needed" not in finding.numbers:
        return finding

    def would_tell(blocks: int) -> bool:
        ahead = replace(tables, taxes=tables.taxes.with_blocks(blocks))
        return judge(ahead).verdict != CANNOT_TELL

    needed = fewest_blocks(tables.study.document["blocks"], would_tell)
    tail = f"it takes {needed} blocks" if needed else f"{MOST_BLOCKS} blocks would not decide it"
    return replace(
        finding,
        sentence=f"{finding.sentence} With this estimate and spread {tail}.",
        numbers={**finding.numbers, "blocks_needed": needed},
    )
