"""What a person watching a study sees: a live bar in a terminal, plain lines in a log file."""

import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.loadgen import Progress
from connector_tax.study.plan import expected_cell_s, remaining

PLAIN_INTERVAL_S = 5.0


def duration(seconds: float) -> str:
    """`7s`, `4m05s`, `2h13m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class LaunchProgress:
    """Shows phase, launch n of the phase's N, cell, completed/min_completed, time left.

    Every message also goes to the job's log file as a plain line; a cell's state goes there every
    five seconds.
    """

    def __init__(self, study: StudyDocument, folder: Path, launch: Launch, log: Path) -> None:
        # Of its phase: a run may measure one alone.
        order = launches(study, launch.phase)
        number = order.index(launch) + 1
        self._title = f"Phase {launch.phase}  launch {number} of {len(order)}  {launch.config}"
        self._config = study["config"]
        self._study_left = remaining(study, folder)
        self._study_left_at = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("a", encoding="utf-8")
        self._console = Console(stderr=True)
        # Blocks on other slots write to the same terminal: two bars would overwrite each other.
        alone = len(study["config"].get("devices", [])) < 2
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True)
            if self._console.is_terminal and alone
            else None
        )
        self._lock = threading.Lock()
        self._cell = ""
        self._expected_s = 0.0
        self._last_plain = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._log.close()

    def say(self, message: str) -> None:
        """A line of its own, on the terminal and in the log."""
        line = self.note(message)
        self._console.print(Text(line), soft_wrap=True)

    def note(self, message: str) -> str:
        """A line in the log only; returns it."""
        line = f"{datetime.now():%H:%M:%S} {self._title}  {message}"
        with self._lock:
            self._log.write(line + "\n")
            self._log.flush()
        return line

    def start_cell(self, name: str, position: int, count: int, rate_rps: float) -> None:
        """A new cell begins."""
        self._cell = f"cell {name} ({position}/{count})"
        self._expected_s = expected_cell_s(self._config, rate_rps)
        self._last_plain = time.monotonic()

    def update(self, progress: Progress) -> None:
        """The load generator's state, about four times a second."""
        wanted = self._config["cell"]["min_completed"]
        left = max(0.0, self._expected_s - progress.elapsed_s)
        study = self._study_left.after(time.monotonic() - self._study_left_at)
        counts = f"{progress.measured_ok}/{wanted} completed"
        if progress.failed or progress.dropped:
            counts += f", {progress.failed} failed, {progress.dropped} dropped"
        times = f"cell {duration(left)} left, study {duration(study.wall_s)} left{study.of_devices}"
        if self._live is not None:
            self._live.update(self._bar(progress, counts, times), refresh=True)
        if time.monotonic() - self._last_plain >= PLAIN_INTERVAL_S:
            self._last_plain = time.monotonic()
            line = self.note(f"{self._cell}  {counts}  {times}")
            if self._live is None:
                print(line, file=sys.stderr, flush=True)

    def _bar(self, progress: Progress, counts: str, times: str) -> Table:
        table = Table.grid(padding=(0, 1))
        done = min(progress.elapsed_s, self._expected_s)
        table.add_row(Text(f"{self._title}  {self._cell}", overflow="ellipsis", no_wrap=True))
        table.add_row(ProgressBar(total=self._expected_s, completed=done, width=40))
        table.add_row(Text(f"{counts}  {times}", overflow="ellipsis", no_wrap=True))
        return table
