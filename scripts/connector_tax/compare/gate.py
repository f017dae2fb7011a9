"""`connector-tax gate STUDY --max-tax ttft_p90=5% --config ID`: is every tax below its bound?

The exit status is the answer: 0 every interval lies below its bound, 1 one lies above, 3 a tax has
no number (void, missing, marked), 2 it cannot be told; 64 the command line is wrong. Where several
taxes are asked for, their intervals are widened so that all of them hold together (Bonferroni).
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from connector_tax import text
from connector_tax.analysis.effect import POWER, Effect
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import REFERENCES
from connector_tax.artifacts.verdicts import CANNOT_TELL, MIN_BLOCKS_FOR_VERDICT
from connector_tax.commands import AnsweringParser
from connector_tax.compare.page import markdown_table
from connector_tax.compare.rows import effect_side
from connector_tax.compare.studies import opened
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, is_stdout, write_bytes, write_text

BELOW, ABOVE, NO_NUMBER = "below", "above", "void or missing"
STATUS = {BELOW: 0, ABOVE: 1, CANNOT_TELL: 2, NO_NUMBER: 3}
# A bound that is broken stays broken, whatever else could not be measured.
WORST_FIRST = (ABOVE, NO_NUMBER, CANNOT_TELL, BELOW)
_BOUND = re.compile(r"(\w+)=([-+]?\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class BoundCheck:
    """One tax against its bound; numbers are fractions.

    Attributes:
        decides: the smallest bound this study would have passed in 80% of its repetitions if there
            were no tax.
    """

    config: str
    metric: str
    bound: float
    result: str
    reason: str
    tax: float | None = None
    lo: float | None = None
    hi: float | None = None
    decides: float | None = None


def check(
    study: StudyTables, config: str, metric: str, bound: float, at: str, comparisons: int
) -> BoundCheck:
    """Judge one of the `comparisons` taxes of Phase A that are judged together.

    `metric` is one of METRICS, `bound` a fraction, `at` a reference rate.
    """
    confidence = study.settings["statistics"]["confidence"]
    row = study.at(at, metric).get(config)
    side = effect_side(row, confidence)
    if isinstance(side, str):
        here = ", ".join(item.id for item in study.connectors)
        reason = side if row is not None else f"no such tax at {at}; the study has {here}"
        return BoundCheck(config, metric, bound, NO_NUMBER, reason)
    if side.mark:
        return BoundCheck(config, metric, bound, NO_NUMBER, side.mark, side.printed)
    known, asked = side.known, BoundCheck(config, metric, bound, CANNOT_TELL, "", side.printed)
    if known.error is None or side.blocks < MIN_BLOCKS_FOR_VERDICT:
        reason = f"{side.blocks} block(s); at least {MIN_BLOCKS_FOR_VERDICT} are needed"
        return replace(asked, reason=reason, lo=side.lo, hi=side.hi)
    together = 1 - (1 - confidence) / comparisons
    lo, hi = known.interval(together)
    result = where(bound, lo, hi)
    reason = f"the whole interval {text.interval(lo, hi)} is {result}"
    if result == CANNOT_TELL:
        reason = f"the interval {text.interval(lo, hi)} holds the bound"
    decides = decided_bound(known, together)
    return replace(asked, result=result, reason=reason, lo=lo, hi=hi, decides=decides)


def where(bound: float, lo: float, hi: float) -> str:
    """Whether an interval lies below a bound, above it, or holds it."""
    return BELOW if hi < bound else ABOVE if lo > bound else CANNOT_TELL


def decided_bound(effect: Effect, confidence: float) -> float:
    """The smallest bound that a study without any tax passes in POWER of its repetitions."""
    return replace(effect, contrast=0.0).interval(confidence, POWER).hi


# ---- the answer


def overall(checks: Sequence[BoundCheck]) -> str:
    """The worst of the results."""
    return next(result for result in WORST_FIRST if any(c.result == result for c in checks))


def junit(study: str, checks: Sequence[BoundCheck]) -> bytes:
    """The checks as JUnit XML: above is a failure, no number an error, undecided is skipped."""
    counts = {result: sum(c.result == result for c in checks) for result in STATUS}
    suite = ElementTree.Element(
        "testsuite", name=f"connector-tax gate {study}", tests=str(len(checks)),
        failures=str(counts[ABOVE]), errors=str(counts[NO_NUMBER]),
        skipped=str(counts[CANNOT_TELL]),
    )  # fmt: skip
    tags = {ABOVE: "failure", NO_NUMBER: "error", CANNOT_TELL: "skipped"}
    for one in checks:
        asserted = f"{one.config}: tax of {one.metric} at most {text.percent(one.bound)}"
        case = ElementTree.SubElement(suite, "testcase", classname=study, name=asserted)
        properties = ElementTree.SubElement(case, "properties")
        for name in ("tax", "lo", "hi", "bound", "decides"):
            if (value := getattr(one, name)) is not None:
                ElementTree.SubElement(properties, "property", name=name, value=repr(value))
        if one.result in tags:
            ElementTree.SubElement(case, tags[one.result], message=one.reason)
    ElementTree.indent(suite)
    content: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def markdown(study: StudyTables, at: str, checks: Sequence[BoundCheck]) -> str:
    """The checks as a Markdown table under the overall answer."""
    headings = ("configuration", "metric", "tax", "interval", "bound", "result", "decides from")
    rows = [
        (c.config, c.metric, text.percent(c.tax), text.interval(c.lo, c.hi),
         text.percent(c.bound), f"{c.result}: {c.reason}", text.percent(c.decides))
        for c in sorted(checks, key=lambda c: WORST_FIRST.index(c.result))
    ]  # fmt: skip
    lines = [f"## Gate: {overall(checks)}", "", f"{study.name} ({study.engine_label}), at {at}", ""]
    return "\n".join([*lines, *markdown_table(headings, rows), ""])


def _bound(argument: str) -> tuple[str, float]:
    match = _BOUND.fullmatch(argument)
    if match is None or match[1] not in METRICS:
        raise argparse.ArgumentTypeError(
            f"found {argument!r}; allowed: METRIC=NUMBER%, METRIC one of {', '.join(METRICS)}"
        )
    return match[1], float(match[2]) / 100


def main(argv: Sequence[str] | None = None) -> int:
    """Judge taxes of a study, or of an archive, against bounds."""
    parser = AnsweringParser(prog="python -m connector_tax.compare.gate", description=main.__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="results/<study>, or an archive")
    parser.add_argument("--max-tax", type=_bound, action="append", required=True,
                        metavar="METRIC=N%", help="may be given several times")  # fmt: skip
    parser.add_argument("--config", action="append", required=True, metavar="ID",
                        help="may be given several times")  # fmt: skip
    parser.add_argument("--at", choices=REFERENCES, default="ref_safe", help="default: ref_safe")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write JUnit XML (- is standard output)"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the summary (-: stdout)"
    )
    arguments = parser.parse_args(argv)
    try:
        return _gate(arguments)
    except (ArtifactError, OSError) as error:
        # Never the status of an answer: 1, which an error that nobody catches has, says above.
        print(f"gate: {error}", file=sys.stderr)
        return STATUS[NO_NUMBER]


def _gate(arguments: argparse.Namespace) -> int:
    with opened(arguments.study) as study:
        # Where both rates are one, its taxes stand under the first name.
        one_rate = study.reference["ref_load"] == study.reference["ref_safe"]
        at = "ref_safe" if one_rate else arguments.at
        asked = list(itertools.product(arguments.config, arguments.max_tax))
        checks = [
            check(study, config, metric, bound, at, len(asked)) for config, (metric, bound) in asked
        ]
        summary = markdown(study, at, checks)
        to_stdout = is_stdout(arguments.junit) or is_stdout(arguments.markdown)
        try:
            if arguments.junit is not None:
                write_bytes(arguments.junit, junit(study.name, checks))
            if arguments.markdown is not None:
                write_text(arguments.markdown, summary)
        finally:
            print(summary, file=sys.stderr if to_stdout else sys.stdout)
    return STATUS[overall(checks)]


if __name__ == "__main__":
    sys.exit(main())
