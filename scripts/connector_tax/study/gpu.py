"""What `nvidia-smi` prints once a second: the GPUs' clocks, power and such, and who uses them.

Of GPUs of other studies nothing is told.
"""

import csv
import os
import subprocess
from collections.abc import Collection
from typing import Any

from connector_tax.linux import die_with_parent

# Names of `nvidia-smi --help-query-gpu`; in this order in every row.
FIELDS = (
    "uuid",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
)
CLOCKS = f"--query-gpu={','.join(FIELDS)}"
# Names of `nvidia-smi --help-query-compute-apps`.
PROCESSES = "--query-compute-apps=gpu_uuid,pid"
PERIOD_MS = 1000
_READ = 65536


class GpuReadings:
    """A child that prints rows once a second.

    Args:
        uuids: the GPUs.
        query: CLOCKS, a row for each GPU, or PROCESSES, one for each process on each.

    Raises:
        OSError: there is no nvidia-smi.
    """

    def __init__(self, uuids: Collection[str], query: str = CLOCKS) -> None:
        self._uuids = uuids
        self._child = subprocess.Popen(
            [
                "nvidia-smi",
                query,
                "--format=csv,noheader,nounits",
                f"--loop-ms={PERIOD_MS}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._child.stdout is not None
        self._pipe = self._child.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._rest = b""

    def take(self) -> list[list[Any]]:
        """The rows that have come since the last call; empty when none has."""
        while True:
            try:
                data = os.read(self._pipe, _READ)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        whole, _, self._rest = self._rest.rpartition(b"\n")
        rows = csv.reader(whole.decode(errors="replace").splitlines(), skipinitialspace=True)
        return [[_number(value) for value in row] for row in rows if row and row[0] in self._uuids]

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


class GpuProcesses(GpuReadings):
    """The processes on some GPUs."""

    def __init__(self, uuids: Collection[str]) -> None:
        super().__init__(uuids, PROCESSES)

    def pids(self) -> set[int]:
        """Those seen since the last call, by nvidia-smi: in many containers it names none."""
        return {int(row[1]) for row in self.take() if isinstance(row[1], float)}


def _number(text: str) -> float | str:
    """A number where the text is one; else the text (throttle reasons are a hexadecimal mask)."""
    try:
        return float(text)
    except ValueError:
        return text.strip()
