"""Run `connector-tax ab` in its own folder, on a machine shared with other tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from connector_tax.ab.__main__ import main
from connector_tax.study import endpoint
from connector_tax.study.guard import PARENT_VARIABLE, process_name
from tests.workflow.harness import device_for, environment

ENGINE = f"{sys.executable} -m connector_tax.engine --port {{port}}"
NO_NUMBER, STOPPED = 3, 130
STOPPED_LINE = "ab: stopped; measurements are kept; rerun the same command to resume\n"
# Cells of one second are enough where no number is checked.
SHORT = """
import sys
from connector_tax.ab import load
load.SHORTEST_S, load.SUCCESSES = 1.0, 20
from connector_tax.ab.__main__ import main
sys.exit(main())
"""


class Ab:
    """The command line of a comparison in results/mine, whose servers are embedded engines."""

    def __init__(self, folder: Path, *further: str, baseline: str = ENGINE, candidate: str = ENGINE,
                 rate: str = "20", shape: str = "64x8") -> None:  # fmt: skip
        self.folder = folder
        self.results = folder / "results" / "mine"
        servers = ["--baseline", baseline, "--candidate", candidate]
        if baseline.startswith("http://"):
            servers = ["--baseline-url", baseline, "--candidate-url", candidate]
        self.command = [
            sys.executable, "-c", SHORT, *servers, *(["--rate", rate] if rate else []),
            "--shape", shape, "--blocks", "3", "--name", "mine", "--shared-machine",
            "--device", device_for(folder), *further,
        ]  # fmt: skip

    def start(self, stderr: int | IO[str]) -> "subprocess.Popen[str]":
        """Start the command in its own process group, like a job of a shell."""
        return subprocess.Popen(
            self.command, cwd=self.folder, env=environment(self.folder), stderr=stderr,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self) -> "subprocess.CompletedProcess[str]":
        """Run the command to its end."""
        with self.start(subprocess.PIPE) as process:
            out, err = process.communicate(timeout=550)
        return subprocess.CompletedProcess(self.command, process.returncode, out, err)

    def call(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Run, in this process, a command that must be refused; return its exit status.

        The test process keeps its signal handlers, and a server's error is reported sooner.
        """
        monkeypatch.chdir(self.folder)
        for name, value in environment(self.folder).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(PARENT_VARIABLE, process_name(os.getpid()))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)
        return main(self.command[3:])
