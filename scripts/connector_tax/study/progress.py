"""Show the progress of a study: a live line in a terminal, plain lines in a log file."""

import os
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Self

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.foreign import printable
from connector_tax.loadgen.plan import Progress
from connector_tax.study.durations import durations_of
from connector_tax.study.plan import remaining
from connector_tax.text import duration

PLAIN_INTERVAL_S = 5.0
# Moves to the start of the line and clears it.
CLEAR = "\r\033[K"


class LaunchProgress:
    """A display of phase, launch n of N, cell, completed/min_completed and time left.

    Every message is also written to the job's log file as a plain line, and so is a cell's state
    every five seconds.
    """

    def __init__(self, study: StudyDocument, folder: Path, launch: Launch, log: Path) -> None:
        # Position within the phase, since a run may measure a single phase.
        order = launches(study, launch.phase)
        number = order.index(launch) + 1
        self._title = f"Phase {launch.phase}  launch {number} of {len(order)}  {launch.config}"
        self._config = study["config"]
        self._known = durations_of(study)
        self._shapes = {
            cell["cell"]: (cell["input_tokens"], cell["output_tokens"])
            for cell in study["cells"][launch.phase]
        }
        self._study_left = remaining(study, folder)
        self._study_left_at = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8")
        # Blocks on other slots use the same terminal: live lines would overwrite each other.
        self._live = sys.stderr.isatty() and len(study["config"].get("devices", [])) < 2
        self._lock = threading.Lock()
        self._cell = ""
        self._expected_s = 0.0
        self._last_plain = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("", end="")
        self._log.close()

    def _show(self, text: str, end: str = "\n") -> None:
        print(f"{CLEAR if self._live else ''}{text}", end=end, file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """Write a line to the terminal and the log."""
        self._show(self.note(message))

    def note(self, message: str) -> str:
        """Write a line to the log only, and return it."""
        line = f"{datetime.now():%H:%M:%S} {self._title}  {printable(message)}"
        with self._lock:
            self._log.write(line + "\n")
            self._log.flush()
        return line

    def start_cell(self, name: str, position: int, count: int, rate_rps: float) -> None:
        """Show the start of a new cell."""
        self._cell = f"cell {name} ({position}/{count})"
        self._expected_s = self._known.cell_s(self._config["cell"], rate_rps, self._shapes[name])
        self._last_plain = time.monotonic()

    def update(self, progress: Progress) -> None:
        """Show the load generator's state; called about four times per second."""
        wanted = self._config["cell"]["min_completed"]
        left = max(0.0, self._expected_s - progress.elapsed_s)
        study = self._study_left.after(time.monotonic() - self._study_left_at)
        counts = f"{progress.measured_ok}/{wanted} completed"
        if progress.failed or progress.dropped:
            counts += f", {progress.failed} failed, {progress.dropped} dropped"
        times = f"cell {duration(left)} left, study {duration(study.wall_s)} left{study.of_devices}"
        state = f"{self._cell}  {counts}  {times}"
        if self._live:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._show(f"{self._title}  {state}"[: columns - 1], end="")
        if time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            line = self.note(state)
            if not self._live:
                self._show(line)
