"""`connector-tax gate STUDY --max ttft_p90=5% --config ID`: check that costs are below bounds.

Exit status: 0 every interval is below its bound, 1 an interval is above, 2 undecided, 3 a cost has
no number (void, missing, marked), 64 bad arguments.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

from connector_tax import text
from connector_tax.analysis.effect import Effect, Levels
from connector_tax.analysis.looks import taxes_of_phase_a
from connector_tax.artifacts import paths
from connector_tax.artifacts.metrics import VERDICT_METRICS, judged_metrics
from connector_tax.artifacts.names import ALL_RATES, REFERENCES
from connector_tax.artifacts.study_file import load_study
from connector_tax.artifacts.tables import EffectRow
from connector_tax.artifacts.verdicts import CANNOT_TELL
from connector_tax.commands import AnsweringParser, limited_by_archive
from connector_tax.compare.bounds import (
    ABOVE,
    NO_NUMBER,
    STATUS,
    WORST_FIRST,
    Bound,
    BoundCheck,
    bound_of,
    bounded,
    check,
    worst,
)
from connector_tax.compare.studies import opened
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError, is_stdout, write_bytes
from connector_tax.foreign import one_line


def checks_of(
    study: StudyTables, configs: Sequence[str], bounds: Sequence[Bound], at: str
) -> list[BoundCheck]:
    """Compare the costs in Phase A with the bounds.

    Args:
        bounds: bounds with a metric apply at the reference rate `at`; others over all rates, to
            the medians that no bound names.
        at: one of REFERENCES.
    """
    combinations = [
        (config, bound, metric)
        for config in configs
        for bound, metric in bounded(bounds, VERDICT_METRICS)
    ]
    confidence = study.settings["statistics"]["confidence"]
    levels = Levels(1 - (1 - confidence) / len(combinations), 2 * confidence - 1)
    taxes = functools.cache(lambda: taxes_of_phase_a(load_study(study.root / paths.STUDY)))

    def mixture(row: EffectRow) -> Effect:
        effect = taxes().at("A", row.cell, row.metric).tax(row.config, levels)
        assert effect is not None
        return effect

    return [
        check(
            study.at(at if bound.metric else ALL_RATES, metric).get(config),
            config, metric, bound.most, levels.wide,
            bool(study.looks) and metric in judged_metrics(study.settings["statistics"]), mixture,
        )
        for config, bound, metric in combinations
    ]  # fmt: skip


def junit(study: str, checks: Sequence[BoundCheck]) -> bytes:
    """Return checks as JUnit XML: failures (above), errors (no number), skips (undecided)."""
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


def _renamed(argument: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"replaced by --max; allowed: --max {argument}")


def main(argv: Sequence[str] | None = None) -> int:
    """Check costs of a study or archive against bounds."""
    parser = AnsweringParser(prog="connector-tax gate", description=main.__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="results/<study>, or an archive")
    parser.add_argument("--max", type=bound_of, action="append", metavar="[METRIC=]N%",
                        help="highest allowed cost of METRIC at --at or, without METRIC, of each"
                        " median that no other --max names, over all rates without saturation; may"
                        " be given several times")  # fmt: skip
    parser.add_argument("--max-tax", type=_renamed, help=argparse.SUPPRESS)
    parser.add_argument("--config", action="append", required=True, metavar="ID",
                        help="configuration to check; may be given several times")  # fmt: skip
    parser.add_argument("--at", choices=REFERENCES, default="ref_safe",
                        help="reference rate for METRIC [ref_safe]")  # fmt: skip
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write JUnit XML (- is standard output)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.max:
        parser.error("--max: missing; allowed: --max 5%, or --max METRIC=5%")
    try:
        return _gate(arguments)
    except (ArtifactError, OSError) as error:
        # Caught, since an uncaught error would exit with status 1: a cost is above its bound.
        print(one_line(f"gate: {error}"), file=sys.stderr)
        return STATUS[NO_NUMBER]


def _gate(arguments: argparse.Namespace) -> int:
    # A study that takes too long has no number; status 2 would mean undecided.
    status = STATUS[NO_NUMBER]
    with (
        opened(arguments.study, status) as study,
        limited_by_archive(study.root, arguments.study, status),
    ):
        # If both rates are equal, taxes are listed under the first name.
        one_rate = study.reference["ref_load"] == study.reference["ref_safe"]
        at = "ref_safe" if one_rate else arguments.at
        checks = checks_of(study, arguments.config, arguments.max, at)
        overall = worst([one.result for one in checks])
        worst_first = sorted(checks, key=lambda one: WORST_FIRST.index(one.result))
        summary = [f"{overall}: {study.name} ({study.engine_label})", *map(str, worst_first)]
        try:
            if arguments.junit is not None:
                write_bytes(arguments.junit, junit(study.name, checks))
        finally:
            stream = sys.stderr if is_stdout(arguments.junit) else sys.stdout
            print("\n".join(map(one_line, summary)), file=stream)
    return STATUS[overall]


if __name__ == "__main__":
    sys.exit(main())
