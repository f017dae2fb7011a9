"""One driver for each launch, wherever it runs: a file that says who measures, with a heartbeat.

A scheduler or a second `snakemake` can start a driver while an earlier one still measures on
another machine, which no lock of either machine shows. The owner touches its file every HEARTBEAT_S
seconds. An owner on this machine is asked for in the process table; one elsewhere lives as long as
its file is touched, which is watched, since two machines' clocks may differ.
"""

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import OwnerRecord
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import read_record
from connector_tax.files import ArtifactError, write_new_json
from connector_tax.machine import machine_alias
from connector_tax.study.device import JOB_VARIABLE
from connector_tax.study.guard import ProcessName
from connector_tax.study.resume import utc

HEARTBEAT_S = 5.0
# An owner elsewhere that misses this many heartbeats has ended.
MISSED = 6


class OwnerError(Exception):
    """Another driver measures the launch; the text says which, and what to do."""


@contextlib.contextmanager
def own_launch(study_folder: Path, launch: Launch, on_loss: Callable[[], None]) -> Iterator[None]:
    """Be the only driver of a launch.

    Args:
        study_folder: results/<study>.
        launch: which.
        on_loss: called from a thread when another driver has taken this one for dead, as after a
            long suspension; must not return.

    Raises:
        OwnerError: another driver measures it.
    """
    path = study_folder / paths.OWNERS / f"{launch.config}.block{launch.block}.{launch.phase}.json"
    mine: OwnerRecord = {
        "launch": launch.name,
        "process": str(ProcessName.of(os.getpid())),
        "machine": machine_alias(),
        "job": os.environ.get(JOB_VARIABLE),
        "since_utc": utc(),
    }
    while not write_new_json(path, mine):
        _remove_ended(path)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, mine, over, on_loss), daemon=True)
    beat.start()
    try:
        yield
    finally:
        over.set()
        beat.join()
        # After a suspension it may be another's by now.
        if _is(path, mine):
            path.unlink(missing_ok=True)


def _remove_ended(path: Path) -> None:
    """Remove the file of an owner that has ended.

    Raises:
        OwnerError: it has not.
    """
    owner = _read(path)
    if owner is None:
        return
    if _lives(path, owner):
        job = f", job {owner['job']}" if owner["job"] else ""
        end = f"scancel {owner['job']}" if owner["job"] else "kill -TERM it there"
        pid = owner["process"].partition(":")[0]
        raise OwnerError(
            f"{owner['launch']} is being measured by process {pid} of {owner['machine']}{job}, "
            f"since {owner['since_utc']}. Wait for it, or end it ({end}); then the same command "
            f"carries on. This machine is {machine_alias()}."
        )
    aside = path.with_name(f".{path.name}.ended.{os.getpid()}@{platform.node()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != owner:
            # Somebody else was quicker, and owns it by now.
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _lives(path: Path, owner: OwnerRecord) -> bool:
    process = ProcessName.parse(owner["process"])
    if process.is_here() and owner["machine"] == machine_alias():
        return process.runs()
    touched, deadline = _touched(path), time.monotonic() + MISSED * HEARTBEAT_S
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 4)
        if _touched(path) != touched:
            return True
    return False


def _touched(path: Path) -> int | None:
    """When the file was touched, by its server's clock; opened, since NFS caches what is not."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path) -> OwnerRecord | None:
    try:
        return read_record(path, OwnerRecord)
    except ArtifactError:
        if path.exists():
            raise
        return None


def _beat(
    path: Path, mine: OwnerRecord, over: threading.Event, on_loss: Callable[[], None]
) -> None:
    while not over.wait(HEARTBEAT_S):
        # A file system that does not answer now may at the next beat.
        with contextlib.suppress(OSError):
            if not _is(path, mine):
                on_loss()
            os.utime(path)


def _is(path: Path, mine: OwnerRecord) -> bool:
    try:
        return _read(path) == mine
    except ArtifactError:
        return False
