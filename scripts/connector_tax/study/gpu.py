"""The GPUs' clocks, temperature, power and throttle reasons, as `nvidia-smi` prints them."""

import csv
import os
import subprocess
from typing import Any

from connector_tax.linux import die_with_parent

# Names of `nvidia-smi --help-query-gpu`; in this order in every row.
FIELDS = (
    "index",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)
PERIOD_MS = 1000
_READ = 65536


class GpuReadings:
    """A child that prints a row for each GPU once a second.

    Raises:
        OSError: there is no nvidia-smi.
    """

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [
                "nvidia-smi",
                f"--query-gpu={','.join(FIELDS)}",
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
        return [[_number(value) for value in row] for row in rows]

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


def _number(text: str) -> float | str:
    """A number where the text is one; else the text (throttle reasons are a hexadecimal mask)."""
    try:
        return float(text)
    except ValueError:
        return text.strip()
