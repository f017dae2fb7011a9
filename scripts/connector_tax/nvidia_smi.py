"""What nvidia-smi says of the GPUs of this machine."""

import csv
import subprocess
from collections.abc import Sequence

from connector_tax.machine import command_output


class GpuError(Exception):
    """nvidia-smi is not there, failed, or printed something else than it was asked for."""


def query_gpus(
    fields: Sequence[str], gpu: str | None = None, units: bool = True
) -> list[dict[str, str]]:
    """These fields of every GPU, by the names of `nvidia-smi --help-query-gpu`.

    Args:
        fields: the names.
        gpu: only this GPU, by its index or UUID.
        units: whether values stand with their units.

    Raises:
        GpuError: the GPUs are not known.
    """
    only = [] if gpu is None else [f"--id={gpu}"]
    form = "csv,noheader" if units else "csv,noheader,nounits"
    try:
        printed = command_output(
            ["nvidia-smi", *only, f"--query-gpu={','.join(fields)}", f"--format={form}"]
        )
    except subprocess.CalledProcessError as error:
        raise GpuError(f"nvidia-smi: {(error.stdout + error.stderr).strip() or error}") from None
    except FileNotFoundError:
        raise GpuError("nvidia-smi is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GpuError(f"nvidia-smi: {error}") from None
    rows = list(csv.reader(printed.splitlines(), skipinitialspace=True))
    if not rows or any(len(row) != len(fields) for row in rows):
        raise GpuError(f"nvidia-smi: found {printed!r}; allowed: lines of {', '.join(fields)}")
    return [dict(zip(fields, row, strict=True)) for row in rows]
