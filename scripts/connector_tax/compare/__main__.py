"""`connector-tax compare A B`: list the differences of studies, and of each tax."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from connector_tax.commands import UNREADABLE, limited_by_archive, run_command
from connector_tax.compare import page
from connector_tax.compare.studies import opened, refuse_unlike
from connector_tax.files import write_text
from connector_tax.foreign import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Compare studies (folders under results/, study.json files or archives) with the first."""
    parser = argparse.ArgumentParser(prog="connector-tax compare", description=main.__doc__)
    parser.add_argument("a", type=Path, metavar="A", help="the study to compare with")
    parser.add_argument("b", type=Path, metavar="B", help="a study of the same kind")
    parser.add_argument("more", type=Path, nargs="*", metavar="C", help="more studies")
    parser.add_argument("--out", type=Path, help="default: results/compare/<A>-<B>...")
    return run_command(parser, argv, _compare, UNREADABLE, label="compare: ")


def _compare(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        given = [arguments.a, arguments.b, *arguments.more]
        studies = [stack.enter_context(opened(path)) for path in given]
        for study, path in zip(studies, given, strict=True):
            stack.enter_context(limited_by_archive(study.root, path))
        for study in studies[1:]:
            refuse_unlike(studies[0], study)
        comparisons = [page.Comparison(studies[0], study) for study in studies[1:]]
        out = arguments.out or Path("results/compare") / "-".join(study.name for study in studies)
        rows = [
            asdict(row) | {"study_a": one.a.name, "study_b": one.b.name}
            for one in comparisons
            for row in one.rows
        ]
        table = pd.DataFrame(rows, dtype=object)
        write_text(out / "compare.csv", table.to_csv(index=False, lineterminator="\n"))
        write_text(out / "compare.html", page.html(comparisons))
        for one in comparisons:
            print(one_line(one.headline))
        print(f"{out}: compare.html, compare.csv")


if __name__ == "__main__":
    sys.exit(main())
