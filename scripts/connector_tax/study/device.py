"""One measurement at a time on a device, whichever user of the machine begins it.

A device is held by a Unix socket of that name in the abstract namespace (unix(7)). All users see
it, whatever their temporary folder is; it needs no right and leaves no file; the kernel says who
holds it (SO_PEERCRED) and gives it free however the holder ends. A container with a network
namespace of its own does not see it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from connector_tax import nvidia_smi

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import StudyConfig

# Which GPUs a server sees.
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.05
_BACKLOG = 1000
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class DeviceError(Exception):
    """A device cannot be held: somebody else holds it, or it is not known."""


def devices_of(config: StudyConfig) -> list[str]:
    """What a study's server runs on: the UUIDs of its GPUs, else the name `server.device`.

    Args:
        config: a resolved configuration.

    Raises:
        DeviceError: the engine is to run on GPUs and nvidia-smi does not list them.
    """
    engine = config["engine"]
    if engine.get("device") != "cuda":
        return [config["server"]["device"]]
    inherited = os.environ.get(VISIBLE_VARIABLE)
    visible = engine.get("environment", {}).get(VISIBLE_VARIABLE, inherited)
    gpus = {gpu["index"]: gpu["uuid"] for gpu in query_gpus(("index", "uuid"))}
    return _visible(gpus, visible)


def query_gpus(fields: Sequence[str]) -> list[dict[str, str]]:
    """As `nvidia_smi.query_gpus`, for a study that is to run on them.

    Raises:
        DeviceError: they are not known.
    """
    try:
        return nvidia_smi.query_gpus(fields)
    except nvidia_smi.GpuError as error:
        raise DeviceError(f"engine.device is cuda, and the GPUs are not known: {error}") from None


def _visible(gpus: Mapping[str, str], visible: str | None) -> list[str]:
    """The UUIDs that CUDA_VISIBLE_DEVICES leaves (indices, or beginnings of UUIDs); None: all."""
    if visible is None:
        return sorted(gpus.values())
    chosen = []
    for entry in (text.strip() for text in visible.split(",")):
        of_entry = [u for i, u in gpus.items() if entry and (i == entry or u.startswith(entry))]
        # A part of a GPU (MIG) is none of them, and has a UUID of its own.
        chosen += of_entry or ([entry] if entry.startswith("MIG-") else [])
    if not chosen:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES: found {visible!r}; allowed: some of {sorted(gpus.values())}"
        )
    return sorted(set(chosen))


@contextlib.contextmanager
def hold_devices(names: Collection[str], wait_s: float = 10.0) -> Iterator[None]:
    """Hold the devices for one measurement.

    Args:
        names: as `devices_of` gives them.
        wait_s: how long a holder that is just going away is waited for.

    Raises:
        DeviceError: a device is still held after `wait_s`; names the holder.
    """
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(_held(name, deadline))
        yield


def _held(name: str, deadline: float) -> socket.socket:
    address = f"\0connector-tax/device/{name}"
    holder = socket.socket(socket.AF_UNIX)
    while True:
        try:
            holder.bind(address)
            break
        except OSError:
            if time.monotonic() > deadline:
                holder.close()
                raise DeviceError(
                    f"device {name!r} is in use by another measurement ({_holder(address)}); two "
                    "on one device would measure each other. Wait for it, or choose another: "
                    "`server.device`, with GPUs CUDA_VISIBLE_DEVICES."
                ) from None
            time.sleep(_POLL_S)
    holder.listen(_BACKLOG)
    return holder


def _holder(address: str) -> str:
    """Process id, user and command of the process that holds a device."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(address)
        except OSError:
            return "unknown"
        data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        command = b"command not known"
    # The kernel says 0 of a process of another container.
    name = f"pid {pid}" if pid else "a process of another container"
    return f"{name}, user {user}: {' '.join(command.decode(errors='replace').split())}"
