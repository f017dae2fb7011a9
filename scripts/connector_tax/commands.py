"""Shared parts of commands on a study: the option `--study`, and status 2 for user errors."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from connector_tax.artifacts import paths
from connector_tax.files import ArtifactError
from connector_tax.foreign import one_line, printable
from connector_tax.linux import limited

# Limits of a command on an unpacked archive; the shipped archives need less than a third.
MEMORY_BYTES, MEMORY_BYTES_PER_BYTE = 1 << 30, 40
CPU_S, CPU_S_PER_MB = 30.0, 10.0
# Errors of commands that only read a study; OSError: a file cannot be opened or written.
UNREADABLE = (ArtifactError, OSError)


class AnsweringParser(argparse.ArgumentParser):
    """A parser that exits with 64 on bad arguments, a status that no command uses for results."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 64."""
        self.exit(os.EX_USAGE, f"{self.prog}: {message}\n")

    def check_page(self, page: Path | None) -> None:
        """Reject a file for --export-markdown that cannot be written."""
        if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
            self.error(f"--export-markdown: found {str(page)!r}; allowed: a file in an existing"
                       " folder")  # fmt: skip


def study_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m connector_tax.<module> --study FILE`.

    Help and errors show the command as typed: `connector-tax NAME`, or the module.
    """
    typed = sys.argv[0].startswith("connector-tax ")
    parser = argparse.ArgumentParser(
        prog=sys.argv[0] if typed else f"python -m connector_tax.{module}", description=description
    )
    parser.add_argument("--study", type=Path, required=True, help="results/<study>/study.json")
    return parser


@contextlib.contextmanager
def limited_by_archive(root: Path, given: Path, status: int = 2) -> Iterator[None]:
    """Limit memory and CPU time of work on a study's folder, if it was unpacked from an archive.

    Args:
        root: the folder.
        given: what the user named: the folder, a file in it, or its archive.
        status: the exit status after too much CPU time.

    Raises:
        ArtifactError: the work takes too much memory.
    """
    origin = root / paths.ORIGIN
    if not origin.is_file():
        yield
        return
    *_, size = ("", *origin.read_text(encoding="utf-8", errors="replace").split())
    archive_bytes = int(size) if size.isdecimal() and len(size) < 19 else 0
    cpu_s = CPU_S + CPU_S_PER_MB * archive_bytes / 1e6
    message = (
        f"{given}: its archive of {archive_bytes / 1e6:.1f} MB took more than {cpu_s:.0f} s of"
        " CPU time, the limit for its size, and may be hostile"
    )
    try:
        memory_bytes = MEMORY_BYTES + MEMORY_BYTES_PER_BYTE * archive_bytes
        with limited(memory_bytes, cpu_s, message, status):
            yield
    except MemoryError:
        raise ArtifactError(f"{given}: takes too much memory for its archive's size") from None


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    work: Callable[[argparse.Namespace], int | None],
    refusals: tuple[type[Exception], ...] = (ArtifactError,),
    label: str = "",
) -> int:
    """Parse `argv` and do the work; return the exit status.

    Args:
        work: returns the exit status; None means 0.
        refusals: exceptions that the user can resolve; their text goes to stderr, with status 2.
        label: a prefix of that text.
    """
    arguments = parser.parse_args(argv)
    study_file: Path | None = getattr(arguments, "study", None)
    try:
        with contextlib.ExitStack() as stack:
            if study_file is not None:
                stack.enter_context(limited_by_archive(study_file.parent, study_file))
            return work(arguments) or 0
    except BrokenPipeError:  # no file failed; handled by files.exit_status
        raise
    except refusals as error:
        text = printable(str(error))
        if isinstance(error, UNREADABLE):
            lines = error.lines if isinstance(error, ArtifactError) else [str(error)]
            text = "\n".join(map(one_line, lines))
        print(f"{label}{text}", file=sys.stderr)
        return 2
