"""The memory of the study's GPUs, which must be free before a server is started on them."""

import time
from collections.abc import Collection

from connector_tax.artifacts.study_records import StudyConfig
from connector_tax.nvidia_smi import GpuError, query_gpus
from connector_tax.servers.kinds import ServerError
from connector_tax.study.device import devices_of

# What vLLM takes where its flags do not say.
VLLM_MEMORY_SHARE = 0.9
FREE_WAIT_S = 60.0
POLL_S = 1.0


def await_free_memory(config: StudyConfig, wait_s: float = FREE_WAIT_S) -> None:
    """Wait until the study's GPUs have the memory free that the server is told to take.

    Without effect where the server runs on no GPU, and for a GPU that does not tell.

    Args:
        config: a resolved configuration.
        wait_s: how long a server that has ended may still hold memory.

    Raises:
        ServerError: a GPU's memory is still in use after `wait_s`; names it.
    """
    engine = config["engine"]
    if engine.get("device") != "cuda":
        return
    wanted = float(engine["flags"].get("--gpu-memory-utilization", VLLM_MEMORY_SHARE))
    devices, deadline = devices_of(config), time.monotonic() + wait_s
    while occupied := _occupied(devices, wanted):
        if time.monotonic() > deadline:
            raise ServerError(
                f"GPU memory is in use: {'; '.join(occupied)}; {wanted:.0%} of it must be free. "
                "End what holds it (nvidia-smi names the processes)"
            )
        time.sleep(POLL_S)


def _occupied(devices: Collection[str], wanted: float) -> list[str]:
    """A line for each of the GPUs with too little memory free."""
    try:
        gpus = query_gpus(("uuid", "memory.used", "memory.total"), units=False)
    except GpuError as error:
        raise ServerError(f"GPU memory: {error}") from error
    lines = []
    for uuid, used, total in (gpu.values() for gpu in gpus):
        known = used.isdecimal() and total.isdecimal()
        if uuid in devices and known and int(total) - int(used) < wanted * int(total):
            lines.append(f"{uuid}: {used} of {total} MiB")
    return lines
