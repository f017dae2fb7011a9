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

from connector_tax.analysis.block_model import MOST_BLOCKS, POWER, fewest_blocks
from connector_tax.analysis.effects import Ahead, Effect, WeightedTax, joined
from connector_tax.analysis.taxes import Tables
from connector_tax.artifacts.metrics import LATENCY_METRICS, margin_of
from connector_tax.artifacts.names import NOOP
from connector_tax.artifacts.stage_records import ConclusionRecord, EffectNumbers
from connector_tax.artifacts.verdicts import CANNOT_TELL, MIN_BLOCKS_FOR_VERDICT
from connector_tax.text import signed

SUPPORTED, REFUTED = "supported", "refuted"
MET, NOT_MET, UNDECIDED = "met", "not met", "undecided"
MOONCAKE, NIXL = "mooncake_both", "nixl_both"
LMCACHE, MULTI = "lmcache_only", "multi_mooncake_lmcache"
# The configurations that each hypothesis is about.
ABOUT = {
    "H1": (MOONCAKE,), "H2": (MOONCAKE, NIXL), "H3": (NOOP, MOONCAKE),
    "H4": (MULTI, MOONCAKE, LMCACHE), "H5": (MOONCAKE,), "H6": (MOONCAKE,),
}  # fmt: skip
SIDES: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "lo >=": ("lo", operator.ge), "lo >": ("lo", operator.gt), "lo <=": ("lo", operator.le),
    "lo <": ("lo", operator.lt),
    "hi <=": ("hi", operator.le), "hi <": ("hi", operator.lt), "hi >=": ("hi", operator.ge),
}  # fmt: skip

Effects = Mapping[str, Effect]
Ends = Mapping[str, Effect | Ahead]
Terms = Sequence[WeightedTax]
Contrast = tuple[Terms, float | None]
Axis = Literal["input_tokens", "output_tokens"]


class Answer(NamedTuple):
    """What is answered where all of `conditions` hold: (effect, end and side, bound)."""

    verdict: str
    tail: str
    conditions: Sequence[tuple[str, str, float]]

    def holds(self, effects: Ends) -> bool:
        """Whether they do."""
        return all(
            of(getattr(effects[name], end), bound)
            for name, side, bound in self.conditions
            for end, of in [SIDES[side]]
        )


class Shown(NamedTuple):
    """An effect in a sentence: `+12.3% [+10.1%, +14.6%]`.

    With `:pp` of a difference of taxes, with `:point` without the interval.
    """

    effect: Effect

    def __format__(self, unit: str) -> str:
        def text(value: float) -> str:
            return f"{signed(100 * value, 1)}{' pp' if unit == 'pp' else '%'}"

        lo, hi = self.effect.ends
        if unit == "point":
            return text(self.effect.point)
        if lo is None or hi is None:
            return f"{text(self.effect.point)} ({self.effect.method})"
        return f"{text(self.effect.point)} [{text(lo)}, {text(hi)}]"


@dataclass(frozen=True)
class Question:
    """A hypothesis, or a criterion that asks for a label.

    Attributes:
        contrasts: the effects it is about, each its taxes and its interval's confidence (None: the
            study's).
        judged: those of them that must carry a verdict.
        answers: of which at most one verdict holds, in whatever order they stand.
        otherwise: said where none does.
        start: of its sentence; `{tax}` and `{gap:pp}` stand for effects.
        numbers: which effects hypotheses.json has, by their names there.
        facts: what else it has.
        label: what the design calls the point estimate.
    """

    id: str
    contrasts: Mapping[str, Contrast]
    judged: Sequence[str]
    answers: Sequence[Answer]
    otherwise: str
    start: str
    numbers: Mapping[str, str]
    facts: Callable[[Effects], Mapping[str, Any]]
    label: Callable[[Effects], str]

    def answer(self, effects: Ends, otherwise: str) -> tuple[str, str]:
        """Verdict and tail; `otherwise` is the verdict where no answer holds."""
        held = sorted({(a.verdict, a.tail) for a in self.answers if a.holds(effects)})
        if not held:
            return otherwise, self.otherwise
        assert len({verdict for verdict, _ in held}) == 1
        return held[0][0], " ".join(tail for _, tail in held)

    def begins(self, effects: Effects) -> str:
        """The start of the sentence with the effects' numbers."""
        return self.start.format(**{name: Shown(effect) for name, effect in effects.items()})

    def told(self, effects: Effects) -> dict[str, Any]:
        """Its numbers in hypotheses.json."""
        numbers = {name: numbers_of(effects[key]) for name, key in self.numbers.items()}
        return {**numbers, **self.facts(effects)}


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
    numbers, label = asked.told(effects), asked.label(effects)
    if why := _undecided(effects[key] for key in asked.judged):
        sentence = f"{asked.begins(effects)}. {why} {_point_sentence(label)}"
        return conclusion(name, CANNOT_TELL, sentence, numbers, label)
    verdict, tail = asked.answer(effects, CANNOT_TELL)
    sentence = f"{asked.begins(effects)}. {tail[0].upper()}{tail[1:]}"
    if verdict != CANNOT_TELL:
        return conclusion(name, verdict, sentence, numbers, label)

    def would_tell(blocks: int) -> bool:
        ahead = {key: effect.ahead(blocks) for key, effect in effects.items()}
        return asked.answer(ahead, CANNOT_TELL)[0] != CANNOT_TELL

    needed = fewest_blocks(made.study.document["blocks"], would_tell)
    more = f"{needed} blocks decide it" if needed else f"{MOST_BLOCKS} blocks would not decide it"
    sentence = f"{sentence} With this estimate and spread {more} in {POWER:.0%} of the studies."
    return conclusion(name, verdict, sentence, numbers | {"blocks_needed": needed}, label)


def _criterion(made: Tables, number: int, what: str, asked: "Question | str") -> ConclusionRecord:
    effects = None if isinstance(asked, str) else _effects(made, asked)
    if effects is None or isinstance(asked, str):
        return conclusion(number, NOT_MET, f"Not reported: there is no number for {what}.")
    label, said = asked.label(effects), asked.begins(effects)
    if why := _undecided(effects[key] for key in asked.judged):
        answer, sentence = UNDECIDED, f"{said}. {why} {_point_sentence(label)}"
    else:
        answer, tail = asked.answer(effects, UNDECIDED)
        sentence = f"{said}. {tail[0].upper()}{tail[1:]}."
    return conclusion(number, MET, sentence, asked.told(effects) | {"label": answer}, label)


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
    return {name: none if study.baseline in ABOUT[name] else q for name, q in asked.items()}


def at_rate(cell: str, *weights: tuple[float, str]) -> Contrast:
    """A combination of the TTFT p90 taxes of several configurations in a Phase A cell."""
    return [WeightedTax(weight, config, "A", cell, "ttft_p90") for weight, config in weights], None


def _h1(cell: str, limits: Any, engine: str, baseline: str) -> Question:
    """The tax persists at a single instance: TTFT p90 of mooncake_both at least h1_min_tax."""
    bound, band = limits["h1_min_tax"], limits["h1_prior_band"]
    there = f"at least {bound:.0%}: on {engine} a single instance has it."
    gone = f"below {bound:.0%}: on {engine} the prior's tax is not there."
    name = f"the {100 * band[0]:g} to {100 * band[1]:g}% band"
    return Question(
        "H1",
        {"tax": at_rate(cell, (1, MOONCAKE))},
        ["tax"],
        [Answer(SUPPORTED, there, [("tax", "lo >=", bound)]),
         Answer(REFUTED, gone, [("tax", "hi <", bound)])],
        f"the interval holds {bound:.0%}, the least the hypothesis asks.",
        f"TTFT p90 of {MOONCAKE} at ref_safe is {{tax}} against {baseline}",
        {"tax_ttft_p90": "tax"},
        lambda _: {"min_tax": bound},
        lambda effects: _place(effects["tax"].point, band, name),
    )  # fmt: skip


def _h2(cell: str, limits: Any, engine: str) -> Question:
    """The gap between Mooncake and NIXL is preserved: inside h2_gap_band_pp."""
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    band = f"{100 * low:g} to {100 * high:g} pp"
    return Question(
        "H2",
        {"gap": at_rate(cell, (1, MOONCAKE), (-1, NIXL))},
        ["gap"],
        [Answer(SUPPORTED, f"inside {band}: on {engine} a single instance has the gap.",
                [("gap", "lo >=", low), ("gap", "hi <=", high)]),
         Answer(REFUTED, f"the gap is inverted: on {engine} that of the prior is not there.",
                [("gap", "hi <", 0)]),
         Answer(REFUTED, f"below {band}: on {engine} the gap of the prior is not there.",
                [("gap", "hi <", low), ("gap", "hi >=", 0)]),
         Answer(REFUTED, f"above {band}: on {engine} the gap is larger than the prior's.",
                [("gap", "lo >", high)])],
        f"the interval crosses a border of the band {band}.",
        f"The TTFT p90 tax of {MOONCAKE} exceeds that of {NIXL} by {{gap:pp}}",
        {"gap": "gap"},
        lambda _: {"band_pp": limits["h2_gap_band_pp"], "prior_gap_pp": limits["h2_prior_gap_pp"]},
        lambda effects: _place(effects["gap"].point, (low, high), f"the {band} band"),
    )  # fmt: skip


def _h3(cell: str, limits: Any) -> Question:
    """The framework is less than h3_framework_share of the Mooncake tax.

    noop < share x mooncake is read off the interval of noop - share x mooncake: a ratio of two
    taxes has no usable interval when the lower one may be zero.
    """
    share = limits["h3_framework_share"]
    nothing = f"the tax of {MOONCAKE} may be zero, and there is nothing to split."
    return Question(
        "H3",
        {"noop": at_rate(cell, (1, NOOP)), "mooncake": at_rate(cell, (1, MOONCAKE)),
         "split": at_rate(cell, (1, NOOP), (-share, MOONCAKE))},
        ["split", "mooncake"],
        [Answer(CANNOT_TELL, nothing, [("mooncake", "lo <=", 0)]),
         Answer(SUPPORTED, f"the framework is less than {share:.0%} of the tax.",
                [("mooncake", "lo >", 0), ("split", "hi <", 0)]),
         Answer(REFUTED, f"the framework is at least {share:.0%} of the tax.",
                [("mooncake", "lo >", 0), ("split", "lo >=", 0)])],
        f"the interval of the difference to {share:.0%} of it holds zero.",
        f"The no-op connector costs {{noop}} TTFT p90, {MOONCAKE} {{mooncake}}",
        {"noop_tax": "noop", "mooncake_tax": "mooncake", "noop_minus_share_of_mooncake": "split"},
        lambda effects: {"share": share, "framework_share": _share(effects)},
        lambda effects: _dominance(limits, effects),
    )  # fmt: skip


def _h4(cell: str, limits: Any) -> Question:
    """The stacked connector's tax is the sum of its parts', within h4_tolerance of itself.

    |multi - sum| <= tolerance x multi is two linear statements, each with its own interval:
    sum - (1 - tolerance) multi >= 0 (not super-additive) and (1 + tolerance) multi - sum >= 0 (not
    sub-additive).
    """
    tolerance = limits["h4_tolerance"]

    def combined(multi: float, parts: float) -> Contrast:
        return at_rate(cell, (multi, MULTI), (parts, MOONCAKE), (parts, LMCACHE))

    def departure(effects: Effects) -> tuple[float, float]:
        """The stack's tax, and how much it is above its parts' sum."""
        multi = effects["multi"].point
        return multi, multi - effects["sum"].point

    def facts(effects: Effects) -> dict[str, Any]:
        multi, above = departure(effects)
        relative = abs(above) / multi if multi > 0 else None
        return {"relative_departure": relative, "tolerance": tolerance}

    def label(effects: Effects) -> str:
        multi, above = departure(effects)
        if multi <= 0:
            return "no tax to add up"
        if abs(above) <= tolerance * multi:
            return "additive"
        return "super-additive" if above > 0 else "sub-additive"

    nothing = "its tax may be zero, and there is nothing to add up."
    return Question(
        "H4",
        {"multi": at_rate(cell, (1, MULTI)), "mooncake": at_rate(cell, (1, MOONCAKE)),
         "lmcache": at_rate(cell, (1, LMCACHE)), "sum": at_rate(cell, (1, MOONCAKE), (1, LMCACHE)),
         "not_super": combined(tolerance - 1, 1),
         "not_sub": combined(1 + tolerance, -1), "excess": combined(1, -1)},
        ["multi", "not_super", "not_sub"],
        [Answer(CANNOT_TELL, nothing, [("multi", "lo <=", 0)]),
         Answer(SUPPORTED, f"additive within {tolerance:.0%}.",
                [("multi", "lo >", 0), ("not_super", "lo >=", 0), ("not_sub", "lo >=", 0)]),
         Answer(REFUTED, "super-additive: the connectors interfere.",
                [("multi", "lo >", 0), ("not_super", "hi <", 0)]),
         Answer(REFUTED, "sub-additive: a cost is shared.",
                [("multi", "lo >", 0), ("not_sub", "hi <", 0)])],
        f"the interval crosses a border of the {tolerance:.0%} tolerance.",
        "The stacked connector costs {multi} TTFT p90 against {sum:point} for the sum of its parts,"
        " apart by {excess:pp}",
        {"multi_tax": "multi", "mooncake_tax": "mooncake", "lmcache_tax": "lmcache",
         "multi_minus_sum": "excess"},
        facts,
        label,
    )  # fmt: skip


def _growth(made: Tables, name: str, metric: str, axis: Axis, across: Axis) -> Question | str:
    """H5, H6: whether a tax of mooncake_both grows along one axis of Phase B.

    Averaged over the other. Supported: every step from one length to the next is positive (all
    intervals above zero need no correction: each must hold), also where all of them together are
    less than the margin, which is said. Refuted: some step is negative, at a level corrected for
    the number of steps, or not every step is positive and all together are below the margin.
    """
    cells = {(c[axis], c[across]): str(c["cell"]) for c in made.study.cells("B")}
    lengths, others = (sorted({key[place] for key in cells}) for place in (0, 1))
    statistics, noun = made.study.config["statistics"], axis.replace("_tokens", "")
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
    words = {"+": "grows", "-": "falls", "0": "does not change"}
    return Question(
        name,
        {**steps, **strict, "whole": change(lengths[0], lengths[-1])},
        ["whole", *steps],
        [Answer(SUPPORTED, f"it grows at every step of the {noun} length.",
                [*grows, ("whole", "hi >=", margin)]),
         Answer(SUPPORTED, f"it grows at every step of the {noun} length, less than {margin:.0%}.",
                [*grows, ("whole", "hi <", margin)]),
         *(Answer(REFUTED, f"it falls at a step of the {noun} length.", [(step, "hi <", 0)])
           for step in strict),
         *(Answer(REFUTED, f"no growth beyond the margin of {margin:.0%}.",
                  [("whole", "hi <", margin), (step, "lo <=", 0)]) for step in steps)],
        "at least one step's interval holds zero.",
        f"From {lengths[0]} to {lengths[-1]} {noun} tokens the {LATENCY_METRICS[metric].label} tax"
        f" of {MOONCAKE} changes by {{whole:pp}}",
        {"whole": "whole"},
        lambda effects: {
            "lengths": lengths, "steps": [numbers_of(effects[step]) for step in steps],
            "per_doubling": effects["whole"].point / doublings, "sign": sign(effects),
        },
        lambda effects: f"{words[sign(effects)]} with {noun} length",
    )  # fmt: skip


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
    inside = [("tax", "lo >=", low), ("tax", "hi <=", high)]
    return Question(
        "1",
        {"tax": at_rate(cell, (1, MOONCAKE))},
        ["tax"],
        [Answer("accepted", f"inside {band}: the prior is accepted", inside),
         *(Answer("revised", f"outside {band}: the prior is revised", [(effect, end, bound)])
           for effect, end, bound in (("tax", "hi <", low), ("tax", "lo >", high)))],
        f"the interval crosses a border of {band}",
        f"{MOONCAKE} at ref_safe: {{tax}}",
        {"tax_ttft_p90": "tax"},
        lambda _: {"band": [low, high]},
        lambda e: f"prior {'accepted' if low <= e['tax'].point <= high else 'revised'}",
    )  # fmt: skip


def _gap_of_h2(cell: str, limits: Any) -> Question:
    """Agreement of the gap with the prior's."""
    low, high = (bound / 100 for bound in limits["h2_gap_band_pp"])
    prior = limits["h2_prior_gap_pp"]
    inside = [("gap", "lo >=", low), ("gap", "hi <=", high)]
    return Question(
        "2",
        {"gap": at_rate(cell, (1, MOONCAKE), (-1, NIXL))},
        ["gap"],
        [Answer("agrees", f"agrees with the prior's {prior:g} pp", inside),
         *(Answer("disagrees", f"disagrees with the prior's {prior:g} pp", [(effect, end, bound)])
           for effect, end, bound in (("gap", "hi <", low), ("gap", "lo >", high)))],
        "agreement with the prior cannot be told",
        "Gap {gap:pp}",
        {"gap": "gap"},
        lambda _: {"prior_gap_pp": prior},
        lambda e: f"{'agrees' if low <= e['gap'].point <= high else 'disagrees'} with the prior",
    )  # fmt: skip


def _label_of_h3(cell: str, limits: Any) -> Question:
    """Framework or implementation: what dominates the tax."""
    most, least = limits["h3_framework_share"], limits["h3_implementation_share"]
    nothing = f"the tax of {MOONCAKE} may be zero, and there is nothing to split"
    partly = (
        f"the framework is less than {most:.0%} of the tax; whether it is less than {least:.0%}"
        " cannot be told"
    )
    taxed = ("mooncake", "lo >", 0.0)
    contrasts = {
        "noop": at_rate(cell, (1, NOOP)), "mooncake": at_rate(cell, (1, MOONCAKE)),
        "upper": at_rate(cell, (1, NOOP), (-most, MOONCAKE)),
        "lower": at_rate(cell, (1, NOOP), (-least, MOONCAKE)),
    }  # fmt: skip
    return Question(
        "3",
        contrasts,
        list(contrasts),
        [Answer(UNDECIDED, nothing, [("mooncake", "lo <=", 0)]),
         Answer("framework-cost-dominated", "the tax is framework-cost-dominated",
                [taxed, ("upper", "lo >=", 0)]),
         Answer("implementation-cost-dominated", "the tax is implementation-cost-dominated",
                [taxed, ("lower", "hi <", 0)]),
         Answer("mixed", "neither the framework nor the implementation dominates",
                [taxed, ("lower", "lo >=", 0), ("upper", "hi <", 0)]),
         Answer(UNDECIDED, partly,
                [taxed, ("upper", "hi <", 0), ("lower", "lo <", 0), ("lower", "hi >=", 0)])],
        "the share of the framework cannot be told",
        f"No-op connector {{noop}}, {MOONCAKE} {{mooncake}}",
        {"noop_tax": "noop", "mooncake_tax": "mooncake"},
        lambda effects: {"framework_share": _share(effects)},
        lambda effects: _dominance(limits, effects),
    )  # fmt: skip


def _share(effects: Effects) -> float | None:
    """The no-op connector's tax over Mooncake's."""
    noop, mooncake = effects["noop"].point, effects["mooncake"].point
    return noop / mooncake if mooncake > 0 else None


def _dominance(limits: Any, effects: Effects) -> str:
    """What the design calls that share."""
    share = _share(effects)
    if share is None:
        return "no tax to split"
    if share >= limits["h3_framework_share"]:
        return "framework-dominated"
    return "implementation-dominated" if share < limits["h3_implementation_share"] else "mixed"


def _place(value: float, band: Sequence[float], name: str) -> str:
    low, high = band
    where = "below" if value < low else "above" if value > high else "inside"
    return f"{where} {name}"
