"""Hypotheses, success criteria and the prior, where the study has what they are about."""

from dataclasses import dataclass
from typing import Literal

from connector_tax.analysis.hypotheses import ABOUT
from connector_tax.analysis.looks import LEFT_OUT, decided_in, read_looks
from connector_tax.artifacts.stage_records import ConclusionRecord
from connector_tax.artifacts.tables import POOLED
from connector_tax.figures.tables import StudyTables
from connector_tax.figures.taxes import other_waits

AXES: dict[str, Literal["input_tokens", "output_tokens"]] = {
    "H5": "input_tokens",
    "H6": "output_tokens",
}
# Each hypothesis, and what it means where it is supported and where it is refuted.
QUESTIONS = {
    "H1": (
        "The tax persists on a single instance under synthetic load",
        "one server pays it without transfers or peers: look in the connector itself",
        "one idle server does not pay the prior's tax: look at transfers, peers and saturation",
    ),
    "H2": (
        "The NIXL–Mooncake gap is the connectors' own, not coupling",
        "the two implementations differ by as much without a cluster around them",
        "the prior's gap came from its setting, not from the two implementations alone",
    ),
    "H3": (
        "The framework is less than half of the Mooncake tax",
        "most of it can be saved in the connector's own code",
        "another connector would pay most of it too: it is to be saved in vLLM's framework",
    ),
    "H4": (
        "Stacked connectors' taxes add up",
        "the cost of a stack can be predicted from its parts",
        "parts share a cost or hinder each other: a stack has to be measured itself",
    ),
    "H5": (
        "The TTFT tax grows with input length",
        "it has a part per prompt token: long prompts pay more",
        "it is a fixed share, whatever the prompt's length",
    ),
    "H6": (
        "The TPOT tax grows with output length",
        "later tokens pay more than early ones: long answers suffer most",
        "each token pays the same share, however long the answer",
    ),
}
REPORTED = {"met": "reported", "not met": "not reported"}


@dataclass(frozen=True)
class Criterion:
    """One success criterion.

    Attributes:
        words: what it asks for.
        needs: the hypotheses whose numbers it needs.
        reported: it asks no more than that a number is there.
    """

    words: str
    needs: tuple[str, ...] = ()
    reported: bool = False


CRITERIA = {
    1: Criterion("The Mooncake tax at ref_safe, beside the prior", ("H1",), reported=True),
    2: Criterion("The NIXL–Mooncake gap at ref_safe, beside the prior", ("H2",), reported=True),
    3: Criterion("The share of the no-op connector in the tax", ("H3",), reported=True),
    4: Criterion("The departure from additivity", ("H4",), reported=True),
    5: Criterion("Sign and size of the growth with length", ("H5", "H6"), reported=True),
    6: Criterion("All artifacts are present, every skip has a reason"),
    7: Criterion("The measurements end in time"),
}


def _asked(study: StudyTables, hypothesis: str) -> bool:
    known = {item.id for item in study.configurations}
    lengths = {cell[AXES[hypothesis]] for cell in study.cells("B")} if hypothesis in AXES else None
    enough = lengths is None or len(lengths) > 1
    return enough and known.issuperset(ABOUT[hypothesis])


def hypotheses(study: StudyTables) -> list[tuple[str, str, str, ConclusionRecord]]:
    """Id, question, meaning and finding of each hypothesis that the study can be asked.

    Where requests wait otherwise for the step with their prompt, H5 says so.
    """
    waits = other_waits(study)
    return [
        (name, QUESTIONS[name][0], _meaning(name, item["verdict"]),
         _with(item, waits if name == "H5" else ""))
        for item in study.hypotheses["hypotheses"]
        if _asked(study, name := str(item["id"]))
    ]  # fmt: skip


def _meaning(name: str, verdict: str) -> str:
    _, supported, refuted = QUESTIONS[name]
    known = {"supported": f"It means: {supported}.", "refuted": f"It means: {refuted}."}
    return known.get(verdict, f"Supported, it would mean: {supported}; refuted: {refuted}.")


def _with(item: ConclusionRecord, more: str) -> ConclusionRecord:
    return {**item, "sentence": f"{item['sentence']} {more}."} if more else item


def looks(study: StudyTables) -> str:
    """Which look decided what, and how many launches that left; empty where none was taken."""
    found: list[str] = []
    known: set[str] = set()
    for taken in read_looks(study.root):
        new = [study.label(name) for name in decided_in(taken) if name not in known]
        known |= decided_in(taken).keys()
        found.append(f"{', '.join(new) or 'nothing'} after {taken['blocks']}")
    if not found:
        return ""
    rows = [row for row in study.cell_rows if row.phase == "A" and row.block != POOLED]
    planned = {(row.config, row.block) for row in rows}
    left_out = {(row.config, row.block) for row in rows if row.reason.startswith(LEFT_OUT)}
    return (
        f"Decided by the look after so many blocks: {'; '.join(found)}. What is decided leaves the"
        f" later blocks: {len(planned) - len(left_out)} of {len(planned)} launches of Phase A"
    )


def not_asked(study: StudyTables) -> list[str]:
    """The hypotheses that need a configuration or a length that the study does not have."""
    return [name for name in ABOUT if not _asked(study, name)]


def criteria(study: StudyTables) -> list[tuple[str, str, str]]:
    """Words, verdict and finding of each success criterion that the study can be held to."""
    return [
        (criterion.words, REPORTED[verdict] if criterion.reported else verdict, item["sentence"])
        for item in study.hypotheses["criteria"]
        for criterion, verdict in [(CRITERIA[int(item["id"])], item["verdict"])]
        if all(_asked(study, name) for name in criterion.needs)
    ]
