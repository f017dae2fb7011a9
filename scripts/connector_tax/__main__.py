"""`connector-tax COMMAND ...`: the main command, which lists and starts the others."""

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from connector_tax import __version__
from connector_tax.files import exit_status, open_closed_streams


class Command(NamedTuple):
    """A subcommand: its module, the extra that it needs, and its description."""

    module: str
    extra: str
    what: str


# First the commands for users who measure servers, then the parts of a study.
COMMANDS = {
    "ab": Command("ab.__main__", "study", "measure what a candidate server costs over a baseline"),
    "settings": Command(
        "settings.__main__", "study", "show how a connector changes vLLM's settings"
    ),
    "loadgen": Command("loadgen.__main__", "loadgen", "load an OpenAI-compatible endpoint"),
    "engine": Command("engine.__main__", "engine", "serve the embedded engine"),
    "compare": Command("compare.__main__", "study", "compare two studies or archives"),
    "gate": Command("compare.gate", "study", "check that a study's taxes are below bounds"),
    "archive": Command("provenance.pack", "study", "pack a study into one file, or unpack one"),
    "doctor": Command("rehearsal.doctor", "study", "check that this machine is fit for a study"),
    "rehearse": Command("rehearsal.__main__", "study", "rehearse a study in virtual time"),
    "remeasure": Command("study.remeasure", "study", "measure void launches of a study again"),
    "plan": Command("rehearsal.plan", "study", "list a study's launches and cells by state"),
    "aggregate": Command("analysis.aggregate", "study", "make tables from raw records"),
    "report": Command("report.__main__", "study", "make tables, figures and page from raw records"),
    "audit": Command("provenance.audit", "study", "check seals, records and recomputed results"),
    "tiny-model": Command("vllm.tiny_model", "study", "write the tiny model of the CPU study"),
    "vllm-environment": Command("vllm.environment", "study", "build a pinned vLLM environment"),
}
# The number of commands in the first group.
FOR_USERS = 7
# Removed commands, and what replaces them.
REMOVED = {
    "calibrate": "run `python -m benchmarks.error_model virtual` in a checkout instead",
    "figures": "run `connector-tax report` instead",
}


def usage() -> str:
    """Return the text of `--help`."""
    rows = [f"  {name:18}{command.what}" for name, command in COMMANDS.items()]
    return (
        "usage: connector-tax COMMAND ...\n       connector-tax --version\n\n"
        "commands (each has its own --help):\n" + "\n".join(rows[:FOR_USERS]) + "\n\n"
        "parts of a study:\n" + "\n".join(rows[FOR_USERS:]) + "\n\n"
        "A whole study runs with Snakemake from a checkout: snakemake --cores 1 all"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command; return its exit status, or 2 if there is no such command.

    After Ctrl-C the status is 130, without a traceback.
    """
    open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # Characters that the encoding lacks are printed as escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return exit_status(lambda: _run(argv))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(argv: Sequence[str] | None) -> int:
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name == "--version":
        print(f"connector-tax {__version__}")
        return 0
    if name in REMOVED:
        print(f"connector-tax: {name} was removed; {REMOVED[name]}", file=sys.stderr)
        return 2
    if name not in COMMANDS:
        print(f"connector-tax: found {name!r}; allowed: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        module = import_module(f"connector_tax.{command.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("connector_tax"):
            raise
        print(
            f"connector-tax {name}: {error.name} is not installed; "
            f"pip install {shlex.quote(f'{_source()}[{command.extra}]')}",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"connector-tax {name}", *rest]
    status: int = module.main()
    return status


def _source() -> str:
    """Return the wheel or clone that the package was installed from, since no index has it."""
    # Imported late, since they would delay every command.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution("connector-tax").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(str(origin.get("url", "")))
    path = unquote(url.path) if url.scheme == "file" else ""
    return path if Path(path).exists() and path else "FILE.whl"


if __name__ == "__main__":
    sys.exit(main())
