"""Run one block of a phase: its launches one after the other, in their seeded order.

Taxes are computed within a block, so a block is one job and cannot be split between machines. Each
launch has its own driver (connector_tax.study.launch). A failed launch does not affect the others;
in Phase A, which all later phases need, it is run once more. A machine that cannot measure ends the
block before its first launch (connector_tax.study.doctor). SIGTERM and SIGUSR1, with which a
scheduler announces its time limit, end the block at the end of a cell; SIGINT ends it at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax.artifacts import paths
from connector_tax.artifacts.names import PHASES, Launch
from connector_tax.artifacts.study_file import launches, load_study, read_study
from connector_tax.commands import run_command, study_parser
from connector_tax.files import ArtifactError
from connector_tax.foreign import printable
from connector_tax.linux import WARNING, die_with_parent, ignore_warning
from connector_tax.study.device import DeviceError, enter_block_slot
from connector_tax.study.guard import ended_with_parent
from connector_tax.study.remeasure import withdraw_failed

if TYPE_CHECKING:
    from connector_tax.artifacts.launch_files import EngineFiles
    from connector_tax.artifacts.study_records import StudyConfig

# An exit status above this is 128 plus the signal that ended the process.
SIGNALLED = 128
# Seconds of a cell besides its window, for the last scrapes and writing the records.
AROUND_A_CELL_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run every launch of one block in one phase; keep the cells that are already measured."""
    parser = study_parser("study.block", main.__doc__)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--logs", type=Path, required=True, help="folder of the launches' logs")
    return run_command(parser, argv, _drive, (ArtifactError, DeviceError))


def end_s(config: StudyConfig) -> int:
    """Return the seconds a block needs to stop: its longest cell, then the stop of the server."""
    cell, server = config["cell"], config["server"]
    cell_s: float = cell["warmup_s"] + cell["cap_s"] + cell["drain_s"] + AROUND_A_CELL_S
    stop_s: float = server["stop_grace_s"] + server["release_s"]
    return math.ceil(cell_s + stop_s)


def _drive(arguments: argparse.Namespace) -> int:
    # Imported here: the workflow plans with this module, but without the doctor's imports.
    from connector_tax.study.doctor import require_fit

    study = read_study(arguments.study)
    drawn = [la for la in launches(study, arguments.phase) if la.block == arguments.block]
    if not drawn:
        print(f"{arguments.study}: run_order has no block {arguments.block}", file=sys.stderr)
        return 2
    root = arguments.study.parent
    ending = _Ending()
    for number in (signal.SIGTERM, WARNING):
        signal.signal(number, ending.tell)
    # A failed launch writes its failure to index.json and exits 0; another status ends the block.
    try:
        # From then on each launch's driver watches Snakemake.
        with ended_with_parent(functools.partial(print, file=sys.stderr)):
            files = require_fit(enter_block_slot(study, root, arguments.block), root)
        run = functools.partial(_run_launches, ending, arguments, files)
        status = run(drawn)
        if arguments.phase == "A" and not status:
            # Reference rates and all later phases need it.
            failed = withdraw_failed(drawn, root)
            for launch, reason in failed.items():
                line = printable(f"{launch.name} failed; running it once more: {reason}")
                print(line, file=sys.stderr)
            status = run(failed)
        if arguments.phase == "A" and not status:
            _look(arguments)
    except KeyboardInterrupt:
        status = SIGNALLED + signal.SIGINT
    if status > SIGNALLED:
        # Snakemake deletes the outputs of a failed job, but not of an interrupted one, and later
        # rejects them. Each index is rewritten from the launch's cells.
        for launch in drawn:
            (launch.folder(root) / paths.INDEX).unlink(missing_ok=True)
    return status


def _look(arguments: argparse.Namespace) -> None:
    """Run the interim analysis due after this block, if any, and print its decisions."""
    from connector_tax.analysis.looks import take_due_look
    from connector_tax.artifacts.looks import decided

    findings = take_due_look(load_study(arguments.study), arguments.block)
    if findings is not None:
        measured = {finding.config for finding in findings if finding.status != "skipped"}
        names = ", ".join(sorted(decided(findings) & measured)) or "nothing"
        print(
            f"interim analysis after {arguments.block + 1} blocks: {names} decided;"
            " not measured further"
        )


def _run_launches(
    ending: _Ending,
    arguments: argparse.Namespace,
    files: dict[str, EngineFiles],
    drawn: Iterable[Launch],
) -> int:
    """Run launches until one exits non-zero; return that status, or 0."""
    for launch in drawn:
        log = arguments.logs / f"{launch.config}.block{launch.block}.{launch.phase}.log"
        status = ending.run([
            *(sys.executable, "-m", "connector_tax.study.launch", "--study", str(arguments.study)),
            *("--config", launch.config, "--block", str(launch.block), "--phase", launch.phase),
            *("--log", str(log), "--engine-files", json.dumps(files)),
        ])  # fmt: skip
        if status:
            return status
    return 0


class _Ending:
    """A runner of a block's launches that starts no further launch after a signal to end."""

    def __init__(self) -> None:
        self._warned = False
        self._child: subprocess.Popen[bytes] | None = None

    def tell(self, *_: object) -> None:
        """Handle a signal: end the running launch after its current cell, and start no other."""
        self._warned = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def run(self, command: Sequence[str]) -> int:
        """Run a launch's driver, which handles signals itself; return its exit status."""
        if self._warned:
            # The signal came in the last cell of the previous launch, which completed.
            return SIGNALLED + signal.SIGTERM
        self._child = subprocess.Popen(command, preexec_fn=_as_child)
        if self._warned:
            self.tell()
        while True:
            try:
                status = self._child.wait()
                break
            except KeyboardInterrupt:
                # The terminal sent Ctrl-C to the driver too.
                continue
        return SIGNALLED - status if status < 0 else status


def _as_child() -> None:
    """Make a launch's driver die with its parent and ignore the scheduler's warning signal."""
    die_with_parent()
    ignore_warning()


if __name__ == "__main__":
    sys.exit(main())
