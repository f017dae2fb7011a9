"""`connector-tax compare A B`: what two studies differ in, and what it did to every tax."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from connector_tax.commands import run_command
from connector_tax.compare import page
from connector_tax.compare.rows import ComparedRow
from connector_tax.compare.studies import (
    NotComparableError,
    opened,
    refuse_other_rates,
    refuse_unlike,
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
    more = "further studies of the same question: a table of all"
    parser.add_argument("more", type=Path, nargs="*", metavar="C", help=more)
    parser.add_argument("--out", type=Path, help="default: results/compare/<A>-<B>")
    refusals = (ArtifactError, NotComparableError)
    return run_command(parser, argv, _compare, refusals, label="compare: ")


def _compare(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        given = [arguments.a, arguments.b, *arguments.more]
        studies = [stack.enter_context(opened(path)) for path in given]
        for study in studies[1:]:
            refuse_unlike(studies[0], study)
        out = arguments.out or Path("results/compare") / f"{studies[0].name}-{studies[-1].name}"
        if arguments.more:
            refuse_other_rates(studies)
            write_text(out / "versions.html", page.versions_html(studies))
            for label, metric, taxes in page.versions(studies):
                own = zip(studies, map(page.tax_words, taxes), strict=True)
                print(f"{label}, {metric}: {'; '.join(f'{of.name} {words}' for of, words in own)}")
            print(out / "versions.html")
            return
        comparison = page.Comparison(studies[0], studies[1])
        save(page.draw(comparison), out, "forest")
        write_text(out / "compare.csv", csv_text(frame(comparison.rows, ComparedRow)))
        write_text(out / "compare.md", page.markdown(comparison))
        write_text(out / "compare.html", page.html(comparison, out / "forest.svg"))
        print(f"{comparison.headline}\n{out}: compare.html, compare.md, compare.csv, forest.png")


if __name__ == "__main__":
    sys.exit(main())
