"""H1 to H6 and criteria 1 to 5 of the design: each a few contrasts, and what intervals answer it.

Source: design, "Hypotheses" and "Success Criteria". Thresholds come from the configuration. An
answer is read off intervals, never off a point, and needs three blocks: the unit of replication is
the server launch. What the point estimate by itself would be called stands beside, and is no
verdict. Where more blocks would tell, their number stands beside (docs/method.md, "Verdicts").
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from connector_tax.analysis.effects import (
    MIN_BLOCKS_FOR_VERDICT,
    MOST_BLOCKS,
    Effect,
    WeightedTax,
    fewest_blocks,
    joined,
)
from connector_tax.analysis.taxes import Tables
from connector_tax.artifacts.metrics import LATENCY_METRICS, margin_of
from connector_tax.artifacts.stage_records import ConclusionRecord, EffectNumbers
from connector_tax.text import signed

SUPPORTED, REFUTED, CANNOT_TELL = "supported", "refuted", "cannot tell"
MET, NOT_MET, UNDECIDED = "met", "not met", "undecided"
NOOP, MOONCAKE, NIXL = "noop_connector", "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"
SIDES: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "lo >=": ("lo", operator.ge), "lo >": ("lo", operator.gt), "lo <=": ("lo", operator.le),
    "hi <=": ("hi", operator.le), "hi <": ("hi", operator.lt),
}  # fmt: skip

Effects = Mapping[str, Effect]
Terms = Sequence[WeightedTax]
Axis = Literal["input_tokens", "output_tokens"]


class Answer(NamedTuple):
    """What is answered where all of `conditions` hold: (effect, end and side, bound)."""

    verdict: str
    tail: str
    conditions: Sequence[tuple[str, str, float]]

    def holds(self, effects: Effects) -> bool:
        """Whether they do."""
        return all(
            of(getattr(effects[name], end), bound)
            for name, side, bound in self.conditions
            for end, of in [SIDES[side]]
        )


class Words(NamedTuple):
    """How a question's numbers are told: the sentence's start, the numbers, the point's label."""

    start: str
    numbers: Mapping[str, Any]
    label: str


@dataclass(frozen=True)
class Question:
    """A hypothesis, or a criterion that asks for a label.

    Attributes:
        contrasts: the effects it is about, each its taxes and its interval's confidence (None: the
            study's).
        judged: those of them that must carry a verdict.
        answers: the first that holds is given.
        otherwise: said where none does.
        told: its numbers in words.
    """

    id: str
    contrasts: Mapping[str, tuple[Terms, float | None]]
    judged: Sequence[str]
    answers: Sequence[Answer]
    otherwise: str
    told: Callable[[Effects], Words]

    def answer(self, effects: Effects, otherwise: str) -> tuple[str, str]:
        """Verdict and tail; `otherwise` is the verdict where no answer holds."""
        for answer in self.answers:
            if answer.holds(effects):
                return answer.verdict, answer.tail
        return otherwise, self.otherwise


def hypotheses(made: Tables) -> list[ConclusionRecord]:
    """What the study says about each hypothesis, as hypotheses.json has it."""
    return [_hypothesis(made, *asked) for asked in _asked(made).items()]


def criteria_of_labels(made: Tables) -> list[ConclusionRecord]:
    """Success criteria 1 to 5: a number is reported and labelled."""
    h4, *growth = (_hypothesis(made, name, _asked(made)[name]) for name in ("H4", "H5", "H6"))
    labels = {SUPPORTED: "linear", REFUTED: "not linear"}
    numbers = _settled(h4) | {"label": labels.get(h4["verdict"], UNDECIDED)}
    sentences = " ".join(found["sentence"] for found in growth)
    labels_of_growth = "; ".join(str(found["point_label"]) for found in growth)
    told = {str(found["id"]): _settled(found) for found in growth}
    return [
        *(_criterion(made, number, *asked) for number, asked in _labelled(made).items()),
        reported(4, [h4], h4["sentence"], numbers, h4["point_label"]),
        reported(5, growth, sentences, told, labels_of_growth),
    ]


def reported(
    number: int,
    findings: Sequence[ConclusionRecord],
    sentence: str,
    numbers: Mapping[str, Any],
    label: str | None,
) -> ConclusionRecord:
    """A criterion that is met where all of these findings have numbers."""
    if not all(found["numbers"] for found in findings):
        return conclusion(number, NOT_MET, f"Not reported. {sentence}")
    return conclusion(number, MET, sentence, numbers, label)


def conclusion(
    identifier: str | int,
    verdict: str,
    sentence: str,
    numbers: Mapping[str, Any] | None = None,
    label: str | None = None,
) -> ConclusionRecord:
    """One finding; `label` is what the design calls the point estimate."""
    return {
        "id": identifier, "verdict": verdict, "sentence": sentence,
        "numbers": dict(numbers or {}), "point_label": label,
    }  # fmt: skip


def _settled(found: ConclusionRecord) -> dict[str, Any]:
    return {key: value for key, value in found["numbers"].items() if key != "blocks_needed"}


def _hypothesis(made: Tables, name: str, asked: "Question | str") -> ConclusionRecord:
    if isinstance(asked, str):
        return conclusion(name, CANNOT_TELL, asked)
    effects = _effects(made, asked)
    if effects is None:
        return conclusion(name, CANNOT_TELL, _no_number(made, asked))
    words = asked.told(effects)
    if why := _undecided(effects[name] for name in asked.judged):
        sentence = f"{words.start}. {why} {_point_sentence(words.label)}"
        return conclusion(name, CANNOT_TELL, sentence, words.numbers, words.label)
    verdict, tail = asked.answer(effects, CANNOT_TELL)
    sentence = f"{words.start}. {tail[0].upper()}{tail[1:]}"
    if verdict != CANNOT_TELL:
        return conclusion(name, verdict, sentence, words.numbers, words.label)

    def would_tell(blocks: int) -> bool:
        ahead = {key: effect.ahead(blocks) for key, effect in effects.items()}
        return asked.answer(ahead, CANNOT_TELL)[0] != CANNOT_TELL

    needed = fewest_blocks(made.study.document["blocks"], would_tell)
    more = f"it takes {needed} blocks" if needed else f"{MOST_BLOCKS} blocks would not decide it"
    sentence = f"{sentence} With this estimate and spread {more}."
    numbers = {**words.numbers, "blocks_needed": needed}
    return conclusion(name, verdict, sentence, numbers, words.label)


def _criterion(made: Tables, number: int, what: str, asked: "Question | str") -> ConclusionRecord:
    effects = None if isinstance(asked, str) else _effects(made, asked)
    if effects is None or isinstance(asked, str):
        return conclusion(number, NOT_MET, f"Not reported: there is no number for {what}.")
    words = asked.told(effects)
    if why := _undecided(effects[name] for name in asked.judged):
        sentence, label = f"{words.start}. {why} {_point_sentence(words.label)}", UNDECIDED
    else:
        label, tail = asked.answer(effects, UNDECIDED)
        sentence = f"{words.start}. {tail[0].upper()}{tail[1:]}."
    return conclusion(number, MET, sentence, {**words.numbers, "label": label}, words.label)


def _effects(made: Tables, asked: Question) -> Effects | None:
    """Every contrast by its name; None where one has no number."""
    found: dict[str, Effect] = {}
    for name, (terms, confidence) in asked.contrasts.items():
        alone = len(terms) == 1 and terms[0].weight == 1
        taxes = made.taxes
        effect = taxes.tax(*terms[0][1:]) if alone else taxes.combination(terms, confidence)
        if effect is None:
            return None
        found[name] = effect
    return found


def _no_number(made: Tables, asked: Question) -> str:
    terms = [term for contrast, _ in asked.contrasts.values() for term in contrast]
    wheres = dict.fromkeys(term[1:] for term in terms)
    why = [
        f"{where[0]}: {status} (block {block}: {reason})"
        for where in wheres
        if made.taxes.tax(*where) is None
        for status, block, reason in made.taxes.lost(*where)[:1]
    ]
    because = "; ".join(why) or "the taxes it compares have no block in common"
    return f"Cannot tell: no number for {because}."


def _undecided(effects: Iterable[Effect]) -> str:
    """Why effects cannot carry a verdict; empty when they can."""
    judged = list(effects)
    if marks := joined(effect.mark for effect in judged):
        return f"Cannot tell, for these latencies are those of survivors: {marks}."
    fewest = min(effect.n_blocks for effect in judged)
    if fewest >= MIN_BLOCKS_FOR_VERDICT:
        return ""
    return (
        f"Cannot tell from {fewest} launch{'es' if fewest > 1 else ''} of each configuration:"
        f" a verdict needs {MIN_BLOCKS_FOR_VERDICT}."
    )


def _point_sentence(label: str) -> str:
    return f"The point estimate by itself: {label}; no verdict."


def numbers_of(effect: Effect) -> EffectNumbers:
    """An effect's point, interval, method and blocks for hypotheses.json; fractions."""
    lo, hi = effect.ends
    return {
        "point": effect.point, "lo": lo, "hi": hi, "method": effect.method,
        "n_blocks": effect.n_blocks, "mark": effect.mark,
    }  # fmt: skip


def shown(effect: Effect, unit: str = "%") -> str:
    """`+12.3% [+10.1%, +14.6%]`; unit `pp` for differences of taxes."""

    def text(value: float) -> str:
        return f"{signed(100 * value, 1)}{'' if unit == '%' else ' '}{unit}"

    lo, hi = effect.ends
    if lo is None or hi is None:
        return f"{text(effect.point)} ({effect.method})"
    return f"{text(effect.point)} [{text(lo)}, {text(hi)}]"


# ---- the hypotheses


def _asked(made: Tables) -> dict[str, Question | str]:
    """H1 to H6; a sentence in place of one that this study cannot be asked."""
    study, cell = made.study, made.cell_at("ref_safe")
    limits, engine = study.config["hypotheses"], study.document["engine_label"]
    none = f"Cannot tell: taxes are against {study.baseline} here, which it is about."
    h5 = _growth(made, "H5", "ttft_p90", "input_tokens", "output_tokens")
    h6 = _growth(made, "H6", "tpot_p90", "output_tokens", "input_tokens")
    if cell is None:
        off = "Cannot tell: ref_safe is not a rate of Phase A."
        asked: dict[str, Question | str] = dict.fromkeys(("H1", "H2", "H3", "H4"), off)
    else:
        asked = {
            q.id: q
            for q in (
                _h1(cell, limits, engine, study.baseline),
                _h2(cell, limits, engine),
                _h3(cell, limits),
                _h4(cell, limits),
            )
        }
    asked |= {"H5": h5, "H6": h6}
    about = {"H1": [MOONCAKE], "H2": [MOONCAKE, NIXL], "H3": [NOOP, MOONCAKE],
             "H4": [MULTI, MOONCAKE, LMCACHE], "H5": [MOONCAKE], "H6": [MOONCAKE]}  # fmt: skip
    return {name: none if study.baseline in about[name] else q for name, q in asked.items()}


def at_rate(cell: str, *weights: tuple[float, str]) -> tuple[Terms, None]:
    """A combination of the TTFT p90 taxes of several configurations in a Phase A cell."""
    return [WeightedTax(weight, config, "A", cell, "ttft_p90") for weight, config in weights], None


def _h1(cell: str, limits: Any, engine: str, baseline: str) -> Question:
    """The tax persists at a single instance: TTFT p90 of mooncake_both at least h1_min_tax."""
    bound, band = limits["h1_min_tax"], limits["h1_prior_band"]

    def told(effects: Effects) -> Words:
        tax = effects["tax"]
        start = f"TTFT p90 of {MOONCAKE} at ref_safe is {shown(tax)} against {baseline}"
        label = _place(tax.point, band, f"the {100 * band[0]:g} to {100 * band[1]:g}% band")
        return Words(start, {"tax_ttft_p90": numbers_of(tax), "min_tax": bound}, label)

    there = f"at least {bound:.0%}: on {engine} a single instance has it."
    gone = f"below {bound:.0%}: on {engine} the prior's tax is not there."
    answers = [
        Answer(SUPPORTED, there, [("tax", "lo >=", bound)]),
        Answer(REFUTED, gone, [("tax", "hi <", bound)]),
    ]
    otherwise = f"the interval holds {bound:.0%}, the least the hypothesis asks."
    return Question("H1", {"tax": at_rate(cell, (1, MOONCAKE))}, ["tax"], answers, otherwise, told)


def _h2(cell: str, limits: Any, engine: str) -> Question:
    """The gap between Mooncake and NIXL is preserved: inside h2_gap_band_pp."""
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    band = f"{100 * low:g} to {100 * high:g} pp"

    def told(effects: Effects) -> Words:
        gap = effects["gap"]
        numbers = {"gap": numbers_of(gap), "band_pp": limits["h2_gap_band_pp"],
                   "prior_gap_pp": limits["h2_prior_gap_pp"]}  # fmt: skip
        start = f"The TTFT p90 tax of {MOONCAKE} exceeds that of {NIXL} by {shown(gap, 'pp')}"
        return Words(start, numbers, _place(gap.point, (low, high), f"the {band} band"))

    answers = [
        Answer(SUPPORTED, f"inside {band}: on {engine} a single instance has the gap.",
               [("gap", "lo >=", low), ("gap", "hi <=", high)]),
        Answer(REFUTED, f"the gap is inverted: on {engine} that of the prior is not there.",
               [("gap", "hi <", 0)]),
        Answer(REFUTED, f"below {band}: on {engine} the gap of the prior is not there.",
               [("gap", "hi <", low)]),
        Answer(REFUTED, f"above {band}: on {engine} the gap is larger than the prior's.",
               [("gap", "lo >", high)]),
    ]  # fmt: skip
    otherwise = f"the interval crosses a border of the band {band}."
    contrasts = {"gap": at_rate(cell, (1, MOONCAKE), (-1, NIXL))}
    return Question("H2", contrasts, ["gap"], answers, otherwise, told)


def _h3(cell: str, limits: Any) -> Question:
    """The framework is less than h3_framework_share of the Mooncake tax.

    noop < share x mooncake is read off the interval of noop - share x mooncake: a ratio of two
    taxes has no usable interval when the lower one may be zero.
    """
    share = limits["h3_framework_share"]

    def told(effects: Effects) -> Words:
        noop, mooncake = effects["noop"], effects["mooncake"]
        numbers = {
            "noop_tax": numbers_of(noop),
            "mooncake_tax": numbers_of(mooncake),
            "framework_share": noop.point / mooncake.point if mooncake.point > 0 else None,
            "noop_minus_share_of_mooncake": numbers_of(effects["split"]),
            "share": share,
        }
        start = f"The no-op connector costs {shown(noop)} TTFT p90, {MOONCAKE} {shown(mooncake)}"
        return Words(start, numbers, _dominance(limits, noop.point, mooncake.point))

    nothing = f"the tax of {MOONCAKE} may be zero, and there is nothing to split."
    answers = [
        Answer(CANNOT_TELL, nothing, [("mooncake", "lo <=", 0)]),
        Answer(SUPPORTED, f"the framework is less than {share:.0%} of the tax.",
               [("split", "hi <", 0)]),
        Answer(REFUTED, f"the framework is at least {share:.0%} of the tax.",
               [("split", "lo >=", 0)]),
    ]  # fmt: skip
    contrasts = {
        "noop": at_rate(cell, (1, NOOP)),
        "mooncake": at_rate(cell, (1, MOONCAKE)),
        "split": at_rate(cell, (1, NOOP), (-share, MOONCAKE)),
    }
    otherwise = f"the interval of the difference to {share:.0%} of it holds zero."
    return Question("H3", contrasts, ["split", "mooncake"], answers, otherwise, told)


def _h4(cell: str, limits: Any) -> Question:
    """The stacked connector's tax is the sum of its parts', within h4_tolerance of itself.

    |multi - sum| <= tolerance x multi is two linear statements, each with its own interval:
    sum - (1 - tolerance) multi >= 0 (not super-additive) and (1 + tolerance) multi - sum >= 0 (not
    sub-additive).
    """
    tolerance = limits["h4_tolerance"]

    def combined(multi: float, parts: float) -> tuple[Terms, None]:
        return at_rate(cell, (multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))

    def told(effects: Effects) -> Words:
        multi, excess = effects["multi"], effects["excess"]
        parts = effects["mooncake"].point + effects["lmcache"].point
        apart = abs(multi.point - parts)
        numbers = {
            **{
                f"{name}_tax": numbers_of(effects[name])
                for name in ("multi", "mooncake", "lmcache")
            },
            "multi_minus_sum": numbers_of(excess),
            "relative_departure": apart / multi.point if multi.point > 0 else None,
            "tolerance": tolerance,
        }
        start = (
            f"The stacked connector costs {shown(multi)} TTFT p90 against {signed(100 * parts, 1)}%"
            f" for the sum of its parts, apart by {shown(excess, 'pp')}"
        )
        label = "super-additive" if multi.point > parts else "sub-additive"
        if multi.point <= 0:
            label = "no tax to add up"
        elif apart <= tolerance * multi.point:
            label = "additive"
        return Words(start, numbers, label)

    nothing = "its tax may be zero, and there is nothing to add up."
    within = [("not_super", "lo >=", 0.0), ("not_sub", "lo >=", 0.0)]
    answers = [
        Answer(CANNOT_TELL, nothing, [("multi", "lo <=", 0)]),
        Answer(SUPPORTED, f"additive within {tolerance:.0%}.", within),
        Answer(REFUTED, "super-additive: the connectors interfere.", [("not_super", "hi <", 0)]),
        Answer(REFUTED, "sub-additive: a cost is shared.", [("not_sub", "hi <", 0)]),
    ]
    contrasts = {
        "multi": at_rate(cell, (1, MULTI)),
        "mooncake": at_rate(cell, (1, MOONCAKE)),
        "lmcache": at_rate(cell, (1, LMCACHE)),
        "not_super": combined(tolerance - 1, 1),
        "not_sub": combined(1 + tolerance, -1),
        "excess": combined(1, -1),
    }
    otherwise = f"the interval crosses a border of the {tolerance:.0%} tolerance."
    judged = ["multi", "not_super", "not_sub"]
    return Question("H4", contrasts, judged, answers, otherwise, told)


def _growth(made: Tables, name: str, metric: str, axis: Axis, across: Axis) -> Question | str:
    """H5, H6: whether a tax of mooncake_both grows along one axis of Phase B.

    Averaged over the other. Supported: every step from one length to the next is positive (all
    intervals above zero need no correction: each must hold). Refuted: some step is negative, at a
    level corrected for the number of steps, or the growth over the whole axis is below the margin.
    """
    cells = {(c[axis], c[across]): str(c["cell"]) for c in made.study.cells("B")}
    lengths, others = (sorted({key[place] for key in cells}) for place in (0, 1))
    statistics, noun = made.study.config["statistics"], axis.replace("_tokens", "")
    if len(lengths) < 2:
        return f"Cannot tell: Phase B has a single length of {axis.replace('_', ' ')}."
    pairs = list(itertools.pairwise(lengths))
    corrected = 1 - (1 - statistics["confidence"]) / len(pairs)

    def change(a: int, b: int, confidence: float | None = None) -> tuple[Terms, float | None]:
        return [
            WeightedTax(sign / len(others), MOONCAKE, "B", cells[length, other], metric)
            for sign, length in ((1.0, b), (-1.0, a))
            for other in others
        ], confidence

    steps, strict = ([f"{kind}{k}" for k in range(len(pairs))] for kind in ("step", "strict"))
    contrasts = {key: change(*pair) for key, pair in zip(steps, pairs, strict=True)}
    contrasts |= {key: change(*pair, corrected) for key, pair in zip(strict, pairs, strict=True)}
    contrasts |= {"whole": change(lengths[0], lengths[-1])}
    margin = margin_of(statistics["margins"], metric)

    def told(effects: Effects) -> Words:
        whole = effects["whole"]
        sign = "+" if whole.point > 0 else "-" if whole.point < 0 else "0"
        numbers = {
            "lengths": lengths,
            "steps": [numbers_of(effects[step]) for step in steps],
            "whole": numbers_of(whole),
            "per_doubling": whole.point / math.log2(lengths[-1] / lengths[0]),
            "sign": sign,
        }
        start = (
            f"From {lengths[0]} to {lengths[-1]} {noun} tokens the {LATENCY_METRICS[metric].label}"
            f" tax of {MOONCAKE} changes by {shown(whole, 'pp')}"
        )
        label = {"+": "grows", "-": "falls", "0": "does not change"}[sign]
        return Words(start, numbers, f"{label} with {noun} length")

    answers = [
        Answer(SUPPORTED, f"it grows at every step of the {noun} length.",
               [(step, "lo >", 0) for step in steps]),
        *(Answer(REFUTED, f"it falls at a step of the {noun} length.", [(step, "hi <", 0)])
          for step in strict),
        Answer(REFUTED, f"no growth beyond the margin of {margin:.0%}.",
               [("whole", "hi <", margin)]),
    ]  # fmt: skip
    otherwise = "at least one step's interval holds zero."
    return Question(name, contrasts, ["whole", *steps], answers, otherwise, told)


# ---- the criteria that ask for a label


def _labelled(made: Tables) -> dict[int, tuple[str, Question | str]]:
    """Criteria 1 to 3: what each asks a number of, and the question that labels it."""
    cell, limits = made.cell_at("ref_safe"), made.study.config["hypotheses"]
    whats = {
        1: f"the TTFT p90 tax of {MOONCAKE} at ref_safe",
        2: f"the gap between {MOONCAKE} and {NIXL} at ref_safe",
        3: f"the TTFT p90 taxes of {NOOP} and {MOONCAKE} at ref_safe",
    }
    if cell is None:
        return {number: (what, "") for number, what in whats.items()}
    questions = (_prior_of_h1(cell, limits), _gap_of_h2(cell, limits), _label_of_h3(cell, limits))
    return {n: (whats[n], asked) for n, asked in zip(whats, questions, strict=True)}


def _prior_of_h1(cell: str, limits: Any) -> Question:
    """The prior is accepted or revised."""
    low, high = limits["h1_prior_band"]
    band = f"[{low:.0%}, {high:.0%}]"

    def told(effects: Effects) -> Words:
        tax = effects["tax"]
        numbers = {"tax_ttft_p90": numbers_of(tax), "band": [low, high]}
        label = f"prior {'accepted' if low <= tax.point <= high else 'revised'}"
        return Words(f"{MOONCAKE} at ref_safe: {shown(tax)}", numbers, label)

    revised = f"outside {band}: the prior is revised"
    answers = [
        Answer("accepted", f"inside {band}: the prior is accepted",
               [("tax", "lo >=", low), ("tax", "hi <=", high)]),
        Answer("revised", revised, [("tax", "hi <", low)]),
        Answer("revised", revised, [("tax", "lo >", high)]),
    ]  # fmt: skip
    otherwise = f"the interval crosses a border of {band}"
    return Question("1", {"tax": at_rate(cell, (1, MOONCAKE))}, ["tax"], answers, otherwise, told)


def _gap_of_h2(cell: str, limits: Any) -> Question:
    """Agreement of the gap with the prior's."""
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    prior = limits["h2_prior_gap_pp"]

    def told(effects: Effects) -> Words:
        gap = effects["gap"]
        label = f"{'agrees' if low <= gap.point <= high else 'disagrees'} with the prior"
        return Words(f"Gap {shown(gap, 'pp')}",
                     {"gap": numbers_of(gap), "prior_gap_pp": prior}, label)  # fmt: skip

    apart = f"disagrees with the prior's {prior:g} pp"
    answers = [
        Answer("agrees", f"agrees with the prior's {prior:g} pp",
               [("gap", "lo >=", low), ("gap", "hi <=", high)]),
        Answer("disagrees", apart, [("gap", "hi <", low)]),
        Answer("disagrees", apart, [("gap", "lo >", high)]),
    ]  # fmt: skip
    contrasts = {"gap": at_rate(cell, (1, MOONCAKE), (-1, NIXL))}
    otherwise = "agreement with the prior cannot be told"
    return Question("2", contrasts, ["gap"], answers, otherwise, told)


def _label_of_h3(cell: str, limits: Any) -> Question:
    """Framework or implementation: what dominates the tax."""
    most, least = limits["h3_framework_share"], limits["h3_implementation_share"]

    def told(effects: Effects) -> Words:
        noop, mooncake = effects["noop"], effects["mooncake"]
        share = noop.point / mooncake.point if mooncake.point > 0 else None
        numbers = {"noop_tax": numbers_of(noop), "mooncake_tax": numbers_of(mooncake),
                   "framework_share": share}  # fmt: skip
        start = f"No-op connector {shown(noop)}, {MOONCAKE} {shown(mooncake)}"
        return Words(start, numbers, _dominance(limits, noop.point, mooncake.point))

    nothing = f"the tax of {MOONCAKE} may be zero, and there is nothing to split"
    open_ = (
        f"the framework is less than {most:.0%} of the tax; whether it is less than {least:.0%}"
        " cannot be told"
    )
    answers = [
        Answer(UNDECIDED, nothing, [("mooncake", "lo <=", 0)]),
        Answer("framework-cost-dominated", "the tax is framework-cost-dominated",
               [("upper", "lo >=", 0)]),
        Answer("implementation-cost-dominated", "the tax is implementation-cost-dominated",
               [("lower", "hi <", 0)]),
        Answer("mixed", "neither the framework nor the implementation dominates",
               [("lower", "lo >=", 0), ("upper", "hi <", 0)]),
        Answer(UNDECIDED, open_, [("upper", "hi <", 0)]),
    ]  # fmt: skip
    contrasts = {
        "noop": at_rate(cell, (1, NOOP)),
        "mooncake": at_rate(cell, (1, MOONCAKE)),
        "upper": at_rate(cell, (1, NOOP), (-most, MOONCAKE)),
        "lower": at_rate(cell, (1, NOOP), (-least, MOONCAKE)),
    }
    otherwise = "the share of the framework cannot be told"
    return Question("3", contrasts, list(contrasts), answers, otherwise, told)


def _dominance(limits: Any, noop: float, mooncake: float) -> str:
    """What the design calls a share of the no-op's tax in the Mooncake tax."""
    if mooncake <= 0:
        return "no tax to split"
    if noop >= limits["h3_framework_share"] * mooncake:
        return "framework-dominated"
    if noop < limits["h3_implementation_share"] * mooncake:
        return "implementation-dominated"
    return "mixed"


def _place(value: float, band: Sequence[float], name: str) -> str:
    low, high = band
    where = "below" if value < low else "above" if value > high else "inside"
    return f"{where} {name}"
