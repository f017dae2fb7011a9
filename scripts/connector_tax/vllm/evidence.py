"""Decide from a server's log and steps whether a connector is really active, for the gates.

A server can answer while its connector is dead: LMCacheConnectorV1 on a CPU starts and answers 200
(docs/vllm.md). Evidence is in the server's log (the created class, lines about failed parts) and in
the step log (called hooks). Gates require all of it; each launch and `ab` check only the lines of
failure (`dead_reason`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from connector_tax.artifacts.cell_records import DeviceLine, StepLine
from connector_tax.artifacts.launch_files import SettingRecord
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.vllm.device_time.copies import Copy

# vLLM's connector factory, and the step probe's own line, which names children too.
_CREATED = re.compile(r"Creating v1 connector with name: (\w+)")
_WATCHED = re.compile(r"connector_tax step probe watches ([\w >]+) \((?:SCHEDULER|WORKER)\)")
# Log lines of vLLM, Mooncake, NIXL and LMCache about a part that did not start.
_FAILED = re.compile(
    r"fail(?:ed|ure) to initiali[sz]e|initiali[sz]ation failed|is not available$", re.I
)
# Log lines after which a started connector cannot transfer: one of its threads has ended, as NIXL's
# does if its handshake port is taken; the others are Mooncake's.
_DEAD = re.compile(
    r"Exception in thread .*(?:nixl|mooncake|lmcache|handshake)|failed to register memory"
    r"|memory registration failed|failed to connect to master",
    re.I,
)
# UCX logs this on every machine without a GPU.
_NO_GPU_PATH = re.compile(r"UCX .*\bcuda_(?:ipc|copy)\b.* (?:is|are) not available")
# Log line -> its consequence for the connector.
_WEAKER = {
    re.compile(r"LMCache.*Failed to allocate memory|Failed to allocate memory block of size"): (
        "LMCache failed to allocate memory: what does not fit is not stored"
    ),
    # vLLM logs the first for every model, the second for models with several kinds of attention.
    re.compile(
        r"Turning off hybrid kv cache manager(?s:.*)manager is disabled for this hybrid model", re.I
    ): (
        "vLLM turned off its hybrid KV cache manager for this connector: every layer keeps the "
        "whole context, so fewer requests fit"
    ),
}
# Optional parts of vLLM, whose absence it logs. A connector's own failure names the connector too.
_NOT_THE_CONNECTOR = re.compile(
    r"\b(?:Triton|Swapping|FlashInfer|Flash ?Attention|FlashMLA|DeepGEMM|deep_gemm|NCCL|NVSHMEM"
    r"|NumPy|custom all-?reduce|symmetric memory|CUDA graphs?|Prometheus|Ray)\b",
    re.I,
)
_THE_CONNECTOR = re.compile(r"connector|mooncake|nixl|lmcache", re.I)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"[A-Za-z_.]+(?:Error|Exception): ")
_TRACEBACK_LINES = 60
# Log lines of Mooncake, NIXL and LMCache about the data path.
_PATHS = {
    "Mooncake protocol": re.compile(r"Mooncake Transfer Engine is using (\w+) as its protocol"),
    "Mooncake RDMA devices": re.compile(r"Topology discovery complete\. Found (\d+) HCAs"),
    "NIXL backend": re.compile(r"Backend (\w+) was instantiated"),
    "LMCache kernels": re.compile(r"lmcache\.\w+ compiled extension (not found)"),
}
# UCX names each lane of an endpoint with its transports: `am(tcp/lo cma/memory)`.
_OWN_ENDPOINT = re.compile(r"UCX +INFO .* self cfg#\d+ (.+)")
_TRANSPORT = re.compile(r"[a-z]\w*/[\w.:-]+")
# Connectors that copy KV blocks to the host over the emulated link.
COPYING = frozenset(
    {
        "LMCacheMPConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
_OFFLOADED = "vllm:kv_offload_total_bytes_total{"
# Layouts of FlashAttention; the first is its default.
GPU_LAYOUTS = ("LBNHC", "LBHNC")
HOOKS: tuple[Literal["build_meta_us", "get_finished_us", "start_load_kv_us"], ...] = (
    "build_meta_us",
    "get_finished_us",
    "start_load_kv_us",
)


def failed_parts(log: str, device: str) -> list[str]:
    """Return the log's lines about failed parts of a connector, with their exceptions."""
    lines = [_COLOUR.sub("", line).strip() for line in log.splitlines()]
    lines_of_failure = []
    for position, line in enumerate(lines):
        other = _NOT_THE_CONNECTOR.search(line) and not _THE_CONNECTOR.search(line)
        dead = _DEAD.search(line) or (device == "cuda" and _NO_GPU_PATH.search(line))
        if dead or (_FAILED.search(line) and not other):
            after = lines[position + 1 : position + 1 + _TRACEBACK_LINES]
            cause = next((text for text in after if _EXCEPTION.match(text)), "")
            line = line.removesuffix("Traceback (most recent call last):").strip()
            lines_of_failure.append(f"{line} {cause}".strip())
    return lines_of_failure


def dead_reason(log: str, device: str, argv: Sequence[str] = ()) -> str | None:
    """Return why a connector that was created cannot transfer, or None.

    Args:
        log: the server's output and error log.
        device: the engine's device; `cuda` requires a path to the GPU's memory.
        argv: the server's command, for a log level at which vLLM names no connector.
    """
    # Without a connector other failures do not matter, since the server serves.
    created = _CREATED.search(log) or any("kv_connector" in word for word in argv)
    if created and (failed := failed_parts(log, device)):
        return f"the server answers, but its log says: {failed[0][:300]}"
    return None


def weaker_notes(log: str) -> list[str]:
    """Return the consequences of log lines that weaken a connector."""
    return [note for pattern, note in _WEAKER.items() if pattern.search(log)]


def active_paths(log: str) -> dict[str, str]:
    """Return the data path of each part of a connector, from the log.

    `_PATHS` has the names. For NIXL, UCX logs at level info the transports of the agent's endpoint
    to itself, the only endpoint of an idle agent.
    """
    paths = {name: sorted(set(pattern.findall(log))) for name, pattern in _PATHS.items()}
    paths["NIXL transports"] = sorted(set(_TRANSPORT.findall(" ".join(_OWN_ENDPOINT.findall(log)))))
    return {name: ", ".join(values) for name, values in paths.items() if values}


def fallback_reason(paths: Mapping[str, str]) -> str | None:
    """Return why the measured path differs from the requested one, or None.

    Args:
        paths: `active_paths`.
    """
    if paths.get("Mooncake protocol") == "rdma" and paths.get("Mooncake RDMA devices") == "0":
        return (
            "Mooncake should use rdma but found no RDMA device and falls back to tcp; set "
            "engine.forms.<id>.extra_config.mooncake_protocol: tcp"
        )
    if "LMCache kernels" in paths:
        return "LMCache lacks its compiled kernels and falls back to torch; install the GPU's build"
    return None


def inactive_reason(
    classes: Sequence[str], log: str, steps: Sequence[StepLine] | None, device: str
) -> str | None:
    """Return why the connector is not really active, or None if all evidence shows that it is.

    Args:
        classes: the expected connector class, then its children's; empty for plain.
        log: the server's output and error log.
        steps: the step records of the gate's requests; None without the probe.
    """
    created = _CREATED.findall(log)
    if not classes:
        return f"plain, but the log names {', '.join(created)}" if created else None
    if not created:
        return "the log does not say that a connector was created"
    if dead := dead_reason(log, device):
        return dead
    if steps is None:
        return None
    watched = {name for names in _WATCHED.findall(log) for name in names.split(" > ")}
    if absent := [name for name in classes if name not in watched]:
        return f"{', '.join(absent)} not created (the probe watches {', '.join(sorted(watched))})"
    return _unseen_hook(classes, steps)


def unproved_device(
    engine: EngineSection,
    settings: Mapping[str, SettingRecord],
    steps: Sequence[DeviceLine],
    flags: Mapping[str, Any],
) -> str | None:
    """Return why a server is not proved to use the emulated device, or None if it is.

    Args:
        engine: the study's `engine` section, whose device is emulated.
        settings: the settings that the running engine resolved.
        steps: the device log of the gate's requests.
        flags: settings that this configuration requires, with their values.
    """
    device = engine["device_time_content"]
    wanted = {
        "kv_blocks": device["kv_blocks"],
        "block_size": device["block_size"],
        "executor": "uni",
        "model_runner": "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
        **flags,
    }
    for name, value in wanted.items():
        if (actual := settings[name]["value"]) != value:
            why = settings[name]["reason"]
            because = f" ({why})" if why else ""
            return f"{name} is {actual!r}{because}, but with a GPU it is {value!r}"
    if (layout := settings["kv_cache_layout"]["value"]) not in GPU_LAYOUTS:
        return f"kv_cache_layout is {layout!r}; allowed: {', '.join(GPU_LAYOUTS)}"
    if not steps:
        return "the emulated device recorded no step"
    if unwaited := sum(step["t_wait_ns"] is None for step in steps):
        return f"the host did not wait for {unwaited} of {len(steps)} steps of the emulated device"
    return None


def uncounted_bytes(
    classes: Sequence[str], values: Mapping[str, float], copies: Iterable[Copy]
) -> str | None:
    """Return why the emulated link's bytes differ from vLLM's own count of them, or None.

    OffloadingConnector counts its copies. Its copies cannot be separated from another connector's.

    Args:
        classes: as for `inactive_reason`.
        values: of the server's /metrics, drained after the gate's requests.
        copies: all copies over the emulated link.
    """
    if COPYING.intersection(classes) != {"OffloadingConnector"}:
        return None
    counted = sum(value for key, value in values.items() if key.startswith(_OFFLOADED))
    copied = sum(copy.size for copy in copies)
    if counted != copied:
        return f"OffloadingConnector counted {counted:.0f} bytes, but the emulated link {copied}"
    return None


def _unseen_hook(classes: Sequence[str], steps: Sequence[StepLine]) -> str | None:
    if not steps:
        return "the step probe recorded no step"
    if unseen := [key for key in HOOKS if all(step[key] is None for step in steps)]:
        return f"the step probe saw {len(steps)} steps but never {', '.join(unseen)}"
    children = {child for step in steps for child in step.get("children_us", {})}
    if idle := [name for name in classes[1:] if name not in children]:
        return f"no hook of the child {', '.join(idle)} was seen in {len(steps)} steps"
    return None
