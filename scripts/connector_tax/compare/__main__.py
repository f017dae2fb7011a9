"""`connector-tax compare A B`: what two studies differ in, and what it did to every tax."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from connector_tax.commands import run_command
from connector_tax.compare import forest, page, versions
from connector_tax.compare.rows import ComparedRow, compare_rows
from connector_tax.compare.studies import (
    NotComparableError,
    left_out,
    opened,
    refuse_unlike,
    what_differs,
)
from connector_tax.figures.style import csv_text, save
from connector_tax.figures.tables import frame
from connector_tax.files import ArtifactError, write_text


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two studies, or many: folders under results/, study.json files or archives."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.compare", description=main.__doc__
    )
    parser.add_argument("a", type=Path, metavar="A", help="the study that stands below the line")
    parser.add_argument("b", type=Path, metavar="B", help="the study that stands above it")
    more = "further studies of the same question: a table of all, with curves"
    parser.add_argument("more", type=Path, nargs="*", metavar="C", help=more)
    parser.add_argument("--out", type=Path, help="default: results/compare/<A>-<B>")
    refusals = (ArtifactError, NotComparableError)
    return run_command(parser, argv, _compare, refusals, label="compare: ")


def _versions(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        paths = [arguments.a, arguments.b, *arguments.more]
        studies = [stack.enter_context(opened(path)) for path in paths]
        for study in studies[1:]:
            refuse_unlike(studies[0], study)
        versions.refuse_other_rates(studies)
        out = arguments.out or Path("results/compare") / f"{studies[0].name}-{studies[-1].name}"
        write_text(out / "versions.html", versions.html(studies))
    for label, metric, own in versions.versions(studies):
        print(f"{label}, {metric}: {'; '.join(f'{of.study} {of.words}' for of in own)}")
    print(out / "versions.html")


def _compare(arguments: argparse.Namespace) -> None:
    if arguments.more:
        _versions(arguments)
        return
    with ExitStack() as stack:
        a, b = (stack.enter_context(opened(path)) for path in (arguments.a, arguments.b))
        refuse_unlike(a, b)
        out = arguments.out or Path("results/compare") / f"{a.name}-{b.name}"
        comparison = page.Comparison(a, b, compare_rows(a, b), what_differs(a, b), left_out(a, b))
        save(forest.draw(a, b, comparison.rows), out, "forest", forest.TITLE)
    write_text(out / "compare.csv", csv_text(frame(comparison.rows, ComparedRow)))
    write_text(out / "compare.md", page.markdown(comparison))
    write_text(out / "compare.html", page.html(comparison, out / "forest.svg"))
    print(f"{comparison.headline}\n{out}: compare.html, compare.md, compare.csv, forest.png")


if __name__ == "__main__":
    sys.exit(main())
