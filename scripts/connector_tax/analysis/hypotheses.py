"""H1 to H6 and the seven success criteria of the design: their contrasts and their conclusions.

Source: design, "Hypotheses" and "Success Criteria". Thresholds come from the configuration. A
conclusion depends on intervals, never on a point estimate, and needs three blocks: the unit of
replication is the server launch. The label of the point estimate is reported too, but is no
verdict. If more blocks would decide, their number is reported (docs/method.md, "Verdicts").
"""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from connector_tax.analysis.effect import MOST_BLOCKS, POWER, Effect, Ends, fewest_blocks
from connector_tax.analysis.effects import TaxTable, WeightedTax, joined
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import CellFolder
from connector_tax.artifacts.metrics import LATENCY_METRICS, margin_of
from connector_tax.artifacts.names import NOOP, PHASES, Launch
from connector_tax.artifacts.stage_records import ConclusionRecord, EffectNumbers, GateRecord
from connector_tax.artifacts.study_file import Study
from connector_tax.artifacts.verdicts import CANNOT_TELL, MIN_BLOCKS_FOR_VERDICT
from connector_tax.files import ArtifactError, read_json

SUPPORTED, REFUTED = "supported", "refuted"
MET, NOT_MET, UNDECIDED = "met", "not met", "undecided"
MOONCAKE, NIXL = "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"
# The configurations that each hypothesis is about.
ABOUT = {
    "H1": (MOONCAKE,), "H2": (MOONCAKE, NIXL), "H3": (NOOP, MOONCAKE),
    "H4": (MULTI, MOONCAKE, LMCACHE), "H5": (MOONCAKE,), "H6": (MOONCAKE,),
}  # fmt: skip
# Criterion that requires a label -> the number that it reports.
REPORTED = {
    1: f"the TTFT p90 tax of {MOONCAKE} at ref_safe",
    2: f"the gap between {MOONCAKE} and {NIXL} at ref_safe",
    3: f"the TTFT p90 taxes of {NOOP} and {MOONCAKE} at ref_safe",
}
SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
NS_PER_HOUR = 3.6e12
# NTP may slew the clock by seconds during a study.
MOST_SET_BACK_S = 60.0

Effects = Mapping[str, Effect]
Bounds = Mapping[str, Effect | Ends]
# Weighted taxes, and the confidence of their combination's interval; None: the study's.
Contrast = tuple[Sequence[WeightedTax], float | None]
Axis = Literal["input_tokens", "output_tokens"]


class Answer(NamedTuple):
    """A verdict and all of its conditions, each as (effect, end and sign, bound)."""

    verdict: str
    tail: str
    conditions: Sequence[tuple[str, str, float]]

    def holds(self, effects: Bounds) -> bool:
        """Return whether every condition holds."""
        return all(
            SIGNS[sign](getattr(effects[name], end), bound)
            for name, side, bound in self.conditions
            for end, sign in [side.split()]
        )


@dataclass(frozen=True)
class Question:
    """A hypothesis, or a criterion that requires a label.

    Attributes:
        contrasts: its effects; all must be able to carry a verdict.
        answers: its possible answers, of which at most one verdict holds.
        otherwise: the sentence's end if no answer holds.
        start: the sentence's beginning; `{tax}` and `{gap:pp}` stand for effects.
        numbers: its numbers in hypotheses.json.
        label: the design's name for the point estimate.
    """

    contrasts: Mapping[str, Contrast]
    answers: Sequence[Answer]
    otherwise: str
    start: str
    numbers: Callable[[Effects], Mapping[str, Any]]
    label: Callable[[Effects], str]

    def answer(self, effects: Bounds) -> tuple[str, str]:
        """Return the verdict, and the end of the sentence that states the conclusion."""
        holding = sorted({(a.verdict, a.tail) for a in self.answers if a.holds(effects)})
        if not holding:
            return CANNOT_TELL, self.otherwise
        assert len({verdict for verdict, _ in holding}) == 1
        return holding[0][0], "; ".join(tail for _, tail in holding)

    def conclude(self, name: str | int, effects: Effects) -> ConclusionRecord:
        """Return the conclusion for these effects."""
        label, verdict = self.label(effects), CANNOT_TELL
        sentence = self.start.format(**effects)
        if why := _undecided(effects):
            sentence = f"{sentence}. {why} By the point estimate alone: {label}."
        else:
            verdict, tail = self.answer(effects)
            sentence = f"{sentence}. {tail[0].upper()}{tail[1:]}."
        return conclusion(name, verdict, sentence, self.numbers(effects), label)


def hypotheses(taxes: TaxTable) -> list[ConclusionRecord]:
    """Return the conclusion on each hypothesis for hypotheses.json."""
    by_name = questions(taxes)
    return [_hypothesis(taxes, name, by_name[name]) for name in ABOUT]


def _hypothesis(taxes: TaxTable, name: str, question: Question | str) -> ConclusionRecord:
    effects = _effects(taxes, question)
    if isinstance(question, str) or isinstance(effects, str):
        return conclusion(name, CANNOT_TELL, str(effects))
    conclusion_record = question.conclude(name, effects)
    if conclusion_record["verdict"] != CANNOT_TELL or _undecided(effects):
        return conclusion_record

    def would_tell(blocks: int) -> bool:
        ahead = {key: effect.ahead(blocks) for key, effect in effects.items()}
        return question.answer(ahead)[0] != CANNOT_TELL

    needed = fewest_blocks(taxes.study.document["blocks"], would_tell)
    more = f"{needed} blocks would" if needed else f"even {MOST_BLOCKS} blocks would not"
    conclusion_record["sentence"] += (
        f" With this estimate and spread, {more} decide it in {POWER:.0%} of studies."
    )
    conclusion_record["numbers"]["blocks_needed"] = needed
    return conclusion_record


def conclusion(
    identifier: str | int,
    verdict: str,
    sentence: str,
    numbers: Mapping[str, Any] | None = None,
    label: str | None = None,
) -> ConclusionRecord:
    """Return a conclusion record; `label` is the design's name for the point estimate."""
    return {
        "id": identifier, "verdict": verdict, "sentence": sentence,
        "numbers": dict(numbers or {}), "point_label": label,
    }  # fmt: skip


def numbers_of(effect: Effect) -> EffectNumbers:
    """Return an effect's point, interval, method and blocks for hypotheses.json, as fractions."""
    lo, hi = effect.ends
    return {
        "point": effect.point, "lo": lo, "hi": hi, "method": effect.method,
        "n_blocks": effect.n_blocks, "mark": effect.mark,
    }  # fmt: skip


def _effects(taxes: TaxTable, question: Question | str) -> Effects | str:
    """Return the effects by name; if one of them has no number, return the reason."""
    if isinstance(question, str):
        return question
    effects = dict[str, Effect]()
    for name, (terms, confidence) in question.contrasts.items():
        alone = len(terms) == 1 and terms[0].weight == 1
        effect = taxes.tax(*terms[0][1:]) if alone else taxes.combination(terms, confidence)
        if effect is not None:
            effects[name] = effect
    if len(effects) == len(question.contrasts):
        return effects
    wheres = dict.fromkeys(term[1:] for terms, _ in question.contrasts.values() for term in terms)
    why = [
        f"{where[0]}: {status} (block {block}: {reason})"
        for where in wheres
        if taxes.tax(*where) is None
        for status, block, reason in taxes.missing_blocks(*where)[:1]
    ]
    because = "; ".join(why) or "the taxes it compares have no block in common"
    return f"Cannot tell: no number for {because}."


def _undecided(effects: Effects) -> str:
    """Return why effects cannot carry a verdict; empty when they can."""
    if marks := joined(effect.mark for effect in effects.values()):
        return f"Cannot tell, since taxes are marked: {marks}."
    fewest = min(effect.n_blocks for effect in effects.values())
    if fewest >= MIN_BLOCKS_FOR_VERDICT:
        return ""
    return (
        f"Cannot tell from {fewest} launch{'es' if fewest > 1 else ''} of each configuration:"
        f" a verdict needs {MIN_BLOCKS_FOR_VERDICT} launches."
    )


# ---- the questions


def questions(taxes: TaxTable) -> dict[str | int, Question | str]:
    """Return H1 to H6 and criteria 1 to 3; a reason replaces a question without an answer."""
    baseline, cell = taxes.study.baseline, taxes.cell_at("ref_safe")
    off = "Cannot tell: ref_safe is not a rate of Phase A."
    by_name: dict[str | int, Question | str] = dict.fromkeys((*REPORTED, *ABOUT), off)
    if cell is not None:
        limits = taxes.study.config["hypotheses"]
        engine = taxes.study.document["engine_label"]
        by_name["H1"], by_name[1] = _persists(cell, limits, engine, baseline)
        by_name["H2"], by_name[2] = _gap(cell, limits, engine)
        by_name["H3"], by_name[3] = _framework(cell, limits)
        by_name["H4"] = _adds_up(cell, limits)
    by_name["H5"] = _grows(taxes, "ttft_p90", "input_tokens", "output_tokens")
    by_name["H6"] = _grows(taxes, "tpot_p90", "output_tokens", "input_tokens")
    none = f"Cannot tell: the hypothesis is about {baseline}, which is this study's baseline."
    return by_name | {name: none for name, about in ABOUT.items() if baseline in about}


def at_rate(cell: str, *weights: tuple[float, str]) -> Contrast:
    """Return a combination of several configurations' TTFT p90 taxes in a Phase A cell."""
    return [WeightedTax(weight, config, "A", cell, "ttft_p90") for weight, config in weights], None


def _in_band(
    effect: str, band: Sequence[float], inside: tuple[str, str], outside: tuple[str, str]
) -> list[Answer]:
    """Return the answers for an interval inside a band, below the band and above the band."""
    low, high = band
    return [
        Answer(*inside, [(effect, "lo >=", low), (effect, "hi <=", high)]),
        Answer(*outside, [(effect, "hi <", low)]),
        Answer(*outside, [(effect, "lo >", high)]),
    ]


def _place(value: float, band: Sequence[float], name: str) -> str:
    low, high = band
    return f"{'below' if value < low else 'above' if value > high else 'inside'} {name}"


def _persists(cell: str, limits: Any, engine: str, baseline: str) -> tuple[Question, Question]:
    """Return H1 (TTFT p90 tax of mooncake_both >= h1_min_tax) and criterion 1 (the prior holds)."""
    bound, band = limits["h1_min_tax"], limits["h1_prior_band"]
    low, high = band
    contrasts = {"tax": at_rate(cell, (1, MOONCAKE))}
    h1 = Question(
        contrasts,
        [Answer(SUPPORTED, f"the tax is at least {bound:.0%} in a single instance on {engine}",
                [("tax", "lo >=", bound)]),
         Answer(REFUTED, f"the tax is below {bound:.0%} in a single instance on {engine}",
                [("tax", "hi <", bound)])],
        f"the interval contains {bound:.0%}, the least that the hypothesis asks for",
        f"The TTFT p90 tax of {MOONCAKE} over {baseline} at ref_safe is {{tax}}",
        lambda e: {"tax_ttft_p90": numbers_of(e["tax"]), "min_tax": bound},
        lambda e: _place(e["tax"].point, band, f"the {100 * low:g} to {100 * high:g}% band"),
    )  # fmt: skip
    words = f"[{low:.0%}, {high:.0%}]"
    accepted = ("accepted", f"inside {words}: the prior is accepted")
    revised = ("revised", f"outside {words}: the prior is revised")
    return h1, Question(
        contrasts,
        _in_band("tax", band, accepted, revised),
        f"the interval crosses an end of {words}",
        f"The TTFT p90 tax of {MOONCAKE} at ref_safe is {{tax}}",
        lambda e: {"tax_ttft_p90": numbers_of(e["tax"]), "band": band},
        lambda e: f"prior {'accepted' if low <= e['tax'].point <= high else 'revised'}",
    )


def _gap(cell: str, limits: Any, engine: str) -> tuple[Question, Question]:
    """Return H2 (Mooncake's tax minus NIXL's is in h2_gap_band_pp) and criterion 2 (the prior)."""
    low, high = band = [bound / 100 for bound in limits["h2_gap_band_pp"]]
    prior, words = limits["h2_prior_gap_pp"], f"{100 * low:g} to {100 * high:g} pp"
    contrasts = {"gap": at_rate(cell, (1, MOONCAKE), (-1, NIXL))}
    h2 = Question(
        contrasts,
        [Answer(SUPPORTED, f"the gap lies within {words} on {engine}, as in the prior",
                [("gap", "lo >=", low), ("gap", "hi <=", high)]),
         Answer(REFUTED, f"the gap on {engine} has the opposite sign of the prior's",
                [("gap", "hi <", 0)]),
         Answer(REFUTED, f"the gap on {engine} is smaller than {words}",
                [("gap", "hi <", low), ("gap", "hi >=", 0)]),
         Answer(REFUTED, f"the gap on {engine} is larger than {words}",
                [("gap", "lo >", high)])],
        f"the interval crosses an end of the band {words}",
        f"The TTFT p90 tax of {MOONCAKE} minus that of {NIXL} is {{gap:pp}}",
        lambda e: {"gap": numbers_of(e["gap"]), "band_pp": limits["h2_gap_band_pp"],
                   "prior_gap_pp": prior},
        lambda e: _place(e["gap"].point, band, f"the {words} band"),
    )  # fmt: skip
    agrees = ("agrees", f"the gap agrees with the prior's {prior:g} pp")
    disagrees = ("disagrees", f"the gap disagrees with the prior's {prior:g} pp")
    return h2, Question(
        contrasts,
        _in_band("gap", band, agrees, disagrees),
        "the interval crosses an end of the prior's band",
        f"The TTFT p90 tax of {MOONCAKE} minus that of {NIXL} is {{gap:pp}}",
        lambda e: {"gap": numbers_of(e["gap"]), "prior_gap_pp": prior},
        lambda e: f"{'agrees' if low <= e['gap'].point <= high else 'disagrees'} with the prior",
    )


def _framework(cell: str, limits: Any) -> tuple[Question, Question]:
    """Return H3 (framework below h3_framework_share of the Mooncake tax) and criterion 3.

    noop < share x mooncake is decided by the interval of noop - share x mooncake, since a ratio of
    two taxes has no usable interval if the denominator may be zero. Criterion 3 names the dominant
    cost.
    """
    most, least = limits["h3_framework_share"], limits["h3_implementation_share"]
    nothing = f"the tax of {MOONCAKE} may be zero, so there may be nothing to split"
    of_both = {"noop": at_rate(cell, (1, NOOP)), "mooncake": at_rate(cell, (1, MOONCAKE))}
    split, lower = (at_rate(cell, (1, NOOP), (-share, MOONCAKE)) for share in (most, least))
    zero, taxed = ("mooncake", "lo <=", 0.0), ("mooncake", "lo >", 0.0)

    def numbers(effects: Effects) -> dict[str, Any]:
        return {f"{name}_tax": numbers_of(effects[name]) for name in of_both}

    def share(effects: Effects) -> float | None:
        noop, mooncake = effects["noop"].point, effects["mooncake"].point
        return noop / mooncake if mooncake > 0 else None

    def dominance(effects: Effects) -> str:
        value = share(effects)
        if value is None:
            return "no tax to split"
        if value >= most:
            return "framework-dominated"
        return "implementation-dominated" if value < least else "mixed"

    h3 = Question(
        {**of_both, "split": split},
        [Answer(CANNOT_TELL, nothing, [zero]),
         Answer(SUPPORTED, f"the framework's share of the tax is less than {most:.0%}",
                [taxed, ("split", "hi <", 0)]),
         Answer(REFUTED, f"the framework's share of the tax is at least {most:.0%}",
                [taxed, ("split", "lo >=", 0)])],
        f"the framework's share of the tax may be above or below {most:.0%}",
        f"The TTFT p90 tax of the no-op connector is {{noop}}, that of {MOONCAKE} {{mooncake}}",
        lambda effects: {
            **numbers(effects), "noop_minus_share_of_mooncake": numbers_of(effects["split"]),
            "share": most, "framework_share": share(effects),
        },
        dominance,
    )  # fmt: skip
    partly = (
        f"the framework's share of the tax is less than {most:.0%}, and may be above or below"
        f" {least:.0%}"
    )
    return h3, Question(
        {**of_both, "upper": split, "lower": lower},
        [Answer(CANNOT_TELL, nothing, [zero]),
         Answer("framework-cost-dominated", "the tax is framework-cost-dominated",
                [taxed, ("upper", "lo >=", 0)]),
         Answer("implementation-cost-dominated", "the tax is implementation-cost-dominated",
                [taxed, ("lower", "hi <", 0)]),
         Answer("mixed", "neither the framework nor the implementation dominates",
                [taxed, ("lower", "lo >=", 0), ("upper", "hi <", 0)]),
         Answer(CANNOT_TELL, partly,
                [taxed, ("upper", "hi <", 0), ("lower", "lo <", 0), ("lower", "hi >=", 0)])],
        f"the framework's share of the tax may be above or below {most:.0%}",
        f"The TTFT p90 tax of the no-op connector is {{noop}}, that of {MOONCAKE} {{mooncake}}",
        lambda effects: {**numbers(effects), "framework_share": share(effects)},
        dominance,
    )  # fmt: skip


def _adds_up(cell: str, limits: Any) -> Question:
    """Return H4: the stacked connector's tax equals the sum of its parts' within h4_tolerance.

    |multi - sum| <= tolerance x multi is two linear statements, each with its own interval: sum -
    (1 - tolerance) multi >= 0 (not super-additive) and (1 + tolerance) multi - sum >= 0 (not
    sub-additive).
    """
    tolerance = limits["h4_tolerance"]
    stack = {"multi": MULTI, "mooncake": MOONCAKE, "lmcache": LMCACHE}
    alone = {name: at_rate(cell, (1, config)) for name, config in stack.items()}

    def combined(multi: float, parts: float) -> Contrast:
        return at_rate(cell, (multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))

    def above(effects: Effects) -> float | None:
        """Return (stack - sum of parts) / stack, in taxes; None if the stack has no tax."""
        multi = effects["multi"].point
        return (multi - effects["sum"].point) / multi if multi > 0 else None

    def numbers(effects: Effects) -> dict[str, Any]:
        relative = above(effects)
        return {
            **{f"{name}_tax": numbers_of(effects[name]) for name in alone},
            "multi_minus_sum": numbers_of(effects["excess"]),
            "relative_departure": None if relative is None else abs(relative),
            "tolerance": tolerance,
        }

    def label(effects: Effects) -> str:
        relative = above(effects)
        if relative is None:
            return "no tax to add up"
        if abs(relative) <= tolerance:
            return "additive"
        return "super-additive" if relative > 0 else "sub-additive"

    taxed = ("multi", "lo >", 0.0)
    return Question(
        {**alone, "sum": at_rate(cell, (1, MOONCAKE), (1, LMCACHE)),
         "not_super": combined(tolerance - 1, 1),
         "not_sub": combined(1 + tolerance, -1), "excess": combined(1, -1)},
        [Answer(CANNOT_TELL, "its tax may be zero, so there may be nothing to add up",
                [("multi", "lo <=", 0)]),
         Answer(SUPPORTED, f"the taxes add up within {tolerance:.0%}",
                [taxed, ("not_super", "lo >=", 0), ("not_sub", "lo >=", 0)]),
         Answer(REFUTED, "super-additive: stacked connectors hinder each other",
                [taxed, ("not_super", "hi <", 0)]),
         Answer(REFUTED, "sub-additive: stacked connectors share a cost",
                [taxed, ("not_sub", "hi <", 0)])],
        f"the interval crosses an end of the {tolerance:.0%} tolerance",
        "The TTFT p90 tax of the stacked connector is {multi}. Its parts' taxes add up to"
        " {sum:point}, a difference of {excess:pp}",
        numbers,
        label,
    )  # fmt: skip


def _grows(taxes: TaxTable, metric: str, axis: Axis, across: Axis) -> Question | str:
    """Return H5 or H6: whether a tax of mooncake_both grows along one axis of Phase B.

    The tax is averaged over the other axis. Supported: every step from one length to the next is
    positive, even if the total is below the margin, which the sentence then states. (No correction
    for several steps is needed, since all must be positive.) Refuted: a step is negative at a level
    corrected for the number of steps, or not every step is positive and the total is below the
    margin.
    """
    cells = {(c[axis], c[across]): str(c["cell"]) for c in taxes.study.cells("B")}
    lengths, others = (sorted({key[place] for key in cells}) for place in (0, 1))
    statistics, noun = taxes.study.config["statistics"], axis.replace("_tokens", "")
    if len(lengths) < 2:
        return f"Cannot tell: Phase B has a single length of {axis.replace('_', ' ')}."
    pairs = list(itertools.pairwise(lengths))
    corrected = 1 - (1 - statistics["confidence"]) / len(pairs)

    def change(a: int, b: int, confidence: float | None = None) -> Contrast:
        return [
            WeightedTax(sign / len(others), MOONCAKE, "B", cells[length, other], metric)
            for sign, length in ((1.0, b), (-1.0, a))
            for other in others
        ], confidence

    steps = {f"step{k}": change(*pair) for k, pair in enumerate(pairs)}
    strict = {f"strict{k}": change(*pair, corrected) for k, pair in enumerate(pairs)}
    margin = margin_of(statistics["margins"], metric)
    doublings = math.log2(lengths[-1] / lengths[0])

    def sign(effects: Effects) -> str:
        whole = effects["whole"].point
        return "+" if whole > 0 else "-" if whole < 0 else "0"

    grows = [(step, "lo >", 0.0) for step in steps]
    growing, below = f"it grows at every step of the {noun} length", ("whole", "hi <", margin)
    words = {"+": "grows", "-": "falls", "0": "does not change"}
    return Question(
        {**steps, **strict, "whole": change(lengths[0], lengths[-1])},
        [Answer(SUPPORTED, growing, [*grows, ("whole", "hi >=", margin)]),
         Answer(SUPPORTED, f"{growing}, less than {margin:.0%}", [*grows, below]),
         *(Answer(REFUTED, f"it falls at a step of the {noun} length", [(step, "hi <", 0)])
           for step in strict),
         *(Answer(REFUTED, f"it does not grow by the margin of {margin:.0%} or more",
                  [below, (step, "lo <=", 0)]) for step in steps)],
        "the interval of at least one step contains zero",
        f"From {lengths[0]} to {lengths[-1]} {noun} tokens, the {LATENCY_METRICS[metric].label} tax"
        f" of {MOONCAKE} changes by {{whole:pp}}",
        lambda effects: {
            "whole": numbers_of(effects["whole"]), "lengths": lengths,
            "steps": [numbers_of(effects[step]) for step in steps],
            "per_doubling": effects["whole"].point / doublings, "sign": sign(effects),
        },
        lambda effects: f"{words[sign(effects)]} with {noun} length",
    )  # fmt: skip


# ---- the success criteria


def criteria(
    taxes: TaxTable,
    conclusions: Sequence[ConclusionRecord],
    cells: Sequence[CellFolder],
    step_timing: bool,
) -> list[ConclusionRecord]:
    """Return all seven criteria in order, for hypotheses.json.

    Criteria 1 to 5 require that a number is reported and labelled.
    """
    by_name, (h4, *growth) = questions(taxes), conclusions[3:]
    labels = {SUPPORTED: "linear", REFUTED: "not linear"}
    numbers = _settled(h4) | {"label": labels.get(h4["verdict"], UNDECIDED)}
    settled = {str(of["id"]): _settled(of) for of in growth}
    return [
        *(_labelled(taxes, number, by_name[number]) for number in REPORTED),
        _reported(4, [h4], numbers),
        _reported(5, growth, settled),
        artifacts(taxes.study, cells, step_timing),
        wall_clock(taxes.study, cells),
    ]


def _labelled(taxes: TaxTable, number: int, question: Question | str) -> ConclusionRecord:
    effects = _effects(taxes, question)
    if isinstance(question, str) or isinstance(effects, str):
        verdict = f"Not reported: there is no number for {REPORTED[number]}."
        return conclusion(number, NOT_MET, verdict)
    conclusion_record = question.conclude(number, effects)
    verdict = conclusion_record["verdict"]
    conclusion_record["numbers"]["label"] = UNDECIDED if verdict == CANNOT_TELL else verdict
    return {**conclusion_record, "verdict": MET}


def _reported(
    number: int, findings: Sequence[ConclusionRecord], numbers: Mapping[str, Any]
) -> ConclusionRecord:
    """Return a criterion that is met if all of these findings have numbers."""
    sentence = " ".join(finding["sentence"] for finding in findings)
    if not all(finding["numbers"] for finding in findings):
        return conclusion(number, NOT_MET, f"Not reported. {sentence}")
    label = "; ".join(str(finding["point_label"]) for finding in findings)
    return conclusion(number, MET, sentence, numbers, label)


def _settled(record: ConclusionRecord) -> dict[str, Any]:
    return {key: value for key, value in record["numbers"].items() if key != "blocks_needed"}


def artifacts(study: Study, cells: Sequence[CellFolder], step_timing: bool) -> ConclusionRecord:
    """Return criterion 6: every launch that ran has its files, and every skip has a reason."""
    try:
        gates: dict[str, GateRecord] = read_json(study.root / paths.PREFLIGHT_STATUS)
    except ArtifactError as error:
        return conclusion(6, NOT_MET, str(error))
    launches: dict[Launch, list[CellFolder]] = {}
    for cell in cells:
        launches.setdefault(Launch(*cell.key[:3]), []).append(cell)
    missing = []
    for launch, members in launches.items():
        name = f"{paths.RUNS}/{launch.name}"
        missing += [f"{name}{what}" for what in _missing(launch, study, members, step_timing)]
        if members[0].status == "skipped" and launch.phase != "Bp":
            entry = gates.get(launch.configuration)
            if entry is None or not entry.get("reason"):
                missing.append(f"{name}: skipped without a reason in preflight_status.json")
    numbers = {"launches": len(launches), "missing": missing}
    if missing:
        sentence = f"{len(missing)} artifacts or reasons are missing, first: {missing[0]}."
        return conclusion(6, NOT_MET, sentence, numbers)
    sentence = f"All artifacts of {len(launches)} launches are present; every skip has its reason."
    return conclusion(6, MET, sentence, numbers)


def _missing(
    launch: Launch, study: Study, members: Sequence[CellFolder], step_timing: bool
) -> Iterator[str]:
    """Yield the files that a launch lacks, and its unmeasured cells with their reasons."""
    folder = launch.folder(study.root)
    if any(cell.status in ("valid", "void") for cell in members):
        yield from (f"/{file}" for file in paths.LAUNCH_FILES if not (folder / file).exists())
    kinds = ["requests", "metrics", *(["engine_step"] if step_timing else [])]
    for cell in members:
        # A failed launch lacks its cells, which the table of cells lists one by one.
        if cell.status in ("failed", "missing"):
            yield f": {cell.key.cell}: {cell.reason}"
        elif cell.status != "skipped":
            files = [cell.file(kind) for kind in kinds]
            yield from (f"/{cell.key.cell}/{file.name}" for file in files if not file.exists())


def wall_clock(study: Study, cells: Sequence[CellFolder]) -> ConclusionRecord:
    """Return criterion 7: the time from first arrival to last drain is below max_hours."""
    limit = study.config["hypotheses"]["max_hours"]
    spans, busy_h = [], 0.0
    for window in (cell.record["window"] for cell in cells if cell.record is not None):
        hours = (window["t_drained_ns"] - window["t_origin_ns"]) / NS_PER_HOUR
        start_h = datetime.fromisoformat(window["started_utc"]).timestamp() / 3600
        spans.append((start_h, start_h + hours))
        busy_h += hours
    if not spans:
        return conclusion(7, CANNOT_TELL, "Cannot tell: no cell was measured.")
    if (back_s := set_back_s(cells)) > MOST_SET_BACK_S:
        sentence = f"Cannot tell: the machine's clock was set back by {back_s:.0f} s meanwhile."
        return conclusion(7, CANNOT_TELL, sentence)
    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
    planned = sum(len(study.document["run_order"][p]) * len(study.cells(p)) for p in PHASES)
    numbers = {"span_hours": span, "cell_hours": busy_h, "max_hours": limit,
               "cells_measured": len(spans), "cells_planned": planned}  # fmt: skip
    sentence = (
        f"{len(spans)} of {planned} planned cells span {span:.2f} h of wall clock"
        f" ({busy_h:.2f} h inside cells), limit {limit:g} h."
    )
    return conclusion(7, MET if span < limit else NOT_MET, sentence, numbers)


def set_back_s(cells: Sequence[CellFolder]) -> float:
    """Return the largest step back of the wall clock between two cells, in s.

    CLOCK_MONOTONIC is the reference. Only measured cells of one recorded boot are compared; the
    result is 0 if no time was lost.
    """
    offsets: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for cell in cells:
        boots = {(node["machine"], node["boot"]) for node in cell.nodes}
        if cell.record is not None and len(boots) == 1:
            window = cell.record["window"]
            begin_s = datetime.fromisoformat(window["started_utc"]).timestamp()
            offset_s = begin_s - window["t_origin_ns"] / 1e9
            offsets[boots.pop()].append((window["t_origin_ns"], offset_s))
    falls = [
        before_s - after_s
        for of_boot in offsets.values()
        for (_, before_s), (_, after_s) in pairwise(sorted(of_boot))
    ]
    return max([0.0, *falls])
