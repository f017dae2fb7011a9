"""What a study says about a question: a verdict, its numbers and a sentence.

Source: design, "Hypotheses" and "Success Criteria". A verdict is read off an interval, never off a
point. Below three blocks nothing is decided: the unit of replication is the server launch. What the
point estimate by itself would be called stands beside, and is no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from connector_tax.analysis.effects import MIN_BLOCKS_FOR_VERDICT, Effect
from connector_tax.analysis.overload import joined
from connector_tax.analysis.taxes import Tables
from connector_tax.artifacts.stage_records import ConclusionRecord, EffectNumbers
from connector_tax.text import signed

SUPPORTED, REFUTED, CANNOT_TELL = "supported", "refuted", "cannot tell"


@dataclass(frozen=True)
class Conclusion:
    """What the study says about one hypothesis.

    Attributes:
        point_label: what the design calls the point estimate; None without one.
    """

    id: str
    verdict: str
    sentence: str
    numbers: Mapping[str, Any]
    point_label: str | None = None

    @property
    def settled(self) -> Mapping[str, Any]:
        """Its numbers, without the blocks that would decide it."""
        return {key: value for key, value in self.numbers.items() if key != "blocks_needed"}

    def as_dict(self) -> ConclusionRecord:
        """The finding as hypotheses.json has it."""
        return cast(ConclusionRecord, asdict(self))


def numbers_of(effect: Effect) -> EffectNumbers:
    """An effect's point, interval, method and blocks for hypotheses.json; fractions."""
    return {
        "point": effect.point,
        "lo": effect.interval.lo,
        "hi": effect.interval.hi,
        "method": effect.interval.method,
        "n_blocks": effect.n_blocks,
        "mark": effect.mark,
    }


def shown(effect: Effect, unit: str = "%") -> str:
    """`+12.3% [+10.1%, +14.6%]`; unit `pp` for differences of taxes."""
    space = "" if unit == "%" else " "

    def text(value: float) -> str:
        return f"{signed(100 * value, 1)}{space}{unit}"

    if effect.interval.lo is None or effect.interval.hi is None:
        return f"{text(effect.point)} ({effect.interval.method})"
    return f"{text(effect.point)} [{text(effect.interval.lo)}, {text(effect.interval.hi)}]"


def undecided(effects: Sequence[Effect]) -> str | None:
    """Why effects cannot carry a verdict; None when they can."""
    marks = joined(effect.mark for effect in effects)
    if marks:
        return f"Cannot tell, for these latencies are those of survivors: {marks}."
    fewest = min(effect.n_blocks for effect in effects)
    if fewest >= MIN_BLOCKS_FOR_VERDICT:
        differ = any(effect.differ for effect in effects)
        return "Cannot tell, for the devices differ." if differ else None
    return (
        f"Cannot tell from {fewest} launch{'es' if fewest > 1 else ''} of each configuration:"
        f" a verdict needs {MIN_BLOCKS_FOR_VERDICT}."
    )


def no_number(identifier: str, tables: Tables, *terms: tuple[str, str, str, str]) -> Conclusion:
    """The finding when a tax is missing: names the status and the reason of each that is."""
    why = [
        f"{config}: {status} (block {block}: {reason})"
        for config, phase, cell, metric in terms
        if tables.taxes.tax(config, phase, cell, metric) is None
        for status, block, reason in tables.taxes.lost(config, phase, cell, metric)[:1]
    ]
    because = "; ".join(why) or "the taxes it compares have no block in common"
    return Conclusion(identifier, CANNOT_TELL, f"Cannot tell: no number for {because}.", {})


def decided(
    identifier: str,
    verdict: str,
    start: str,
    tail: str,
    numbers: Mapping[str, Any],
    effects: Sequence[Effect],
    label: str,
) -> Conclusion:
    """The finding, unless nothing can be decided: then the numbers stand without a verdict.

    One that cannot be told since its intervals are too wide has `blocks_needed` among its numbers,
    not known here.
    """
    why = undecided(effects)
    if why is not None:
        sentence = f"{start}. {why} {point_sentence(label)}"
        return Conclusion(identifier, CANNOT_TELL, sentence, numbers, label)
    sentence = f"{start}. {tail[0].upper()}{tail[1:]}"
    if verdict == CANNOT_TELL:
        numbers = {**numbers, "blocks_needed": None}
    return Conclusion(identifier, verdict, sentence, numbers, label)


def point_sentence(label: str) -> str:
    """The point estimate's label where there is no verdict, said to be one."""
    return f"The point estimate by itself: {label}; no verdict."
