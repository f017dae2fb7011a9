"""Share what every command on a study needs: the option `--study`, and status 2 for user errors."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from connector_tax.files import ArtifactError
from connector_tax.foreign import printable


class AnsweringParser(argparse.ArgumentParser):
    """A parser whose status for a wrong command line is none of a command's answers: 64."""

    def error(self, message: str) -> NoReturn:
        """End the process with a line that says what is wrong."""
        self.exit(os.EX_USAGE, f"{self.prog}: {message}\n")


def study_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m connector_tax.<module> --study FILE`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m connector_tax.{module}", description=description
    )
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    work: Callable[[argparse.Namespace], int | None],
    refusals: tuple[type[Exception], ...] = (ArtifactError,),
    label: str = "",
) -> int:
    """Parse `argv` and do the work; the exit status of the command.

    Args:
        work: its result is the exit status, None is 0.
        refusals: what `work` raises where the user can help; the text goes to stderr, status 2.
        label: stands before that text.
    """
    arguments = parser.parse_args(argv)
    try:
        return work(arguments) or 0
    except refusals as error:
        print(printable(f"{label}{error}"), file=sys.stderr)
        return 2
