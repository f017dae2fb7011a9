"""What the running engine made of its configuration: settings.json of a launch's folder.

Two configurations can differ by more than the connector: it may ask for another KV-cache layout, or
leave fewer blocks. Each setting has its value and where it was read, or null and the reason: from
the engine's own objects (`probe`: vllm.settings_probe), else `vllm:cache_config_info` (`metrics`),
else the log. Beside the settings stand the environment variables the server runs with, and the
names of those of the caller that it has not.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from connector_tax.artifacts.launch_files import EngineRecord, SettingRecord
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.servers.kinds import STEP_LOG_PREFIX, Engine, engine_of, without_root
from connector_tax.study.server import Server
from connector_tax.study.server_environment import can_change, cleared_names, shown

SETTINGS = (
    "kv_cache_layout",
    "kv_blocks",
    "block_size",
    "kv_tokens",
    "kv_cache_dtype",
    "attention_backend",
    "cudagraph_mode",
    "compilation_mode",
    "executor",
    "engine_core_process",
    "tensor_parallel_size",
    "async_scheduling",
    "hybrid_kv_cache_manager",
    "prefix_caching",
    "chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "model_runner",
    "log_level",
    "enforce_eager",
    "dtype",
)
_METRIC = "vllm:cache_config_info"
# Label of the metric, and how its text is read.
_LABELS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "kv_cache_layout": ("kv_cache_layout", str),
    "kv_blocks": ("num_gpu_blocks", int),
    "block_size": ("block_size", int),
    "kv_tokens": ("kv_cache_size_tokens", int),
    "kv_cache_dtype": ("cache_dtype", str),
    "prefix_caching": ("enable_prefix_caching", {"True": True, "False": False}.__getitem__),
}
_PARTS = ("engine", "worker")


def engine_record(
    server: Server, section: EngineSection, caller: Mapping[str, str], page: str | None
) -> EngineRecord:
    """The settings and the environment of a server that is ready.

    Args:
        section: the `engine` section of its study.
        caller: the environment launch.sh was started with.
        page: the text of its /metrics; None where it did not answer.
    """
    engine = engine_of(section)
    sources = {
        "probe": _of_probe(server.folder, server.pid),
        "metrics": _of_metrics(page),
        "log": {n: _told(v) for n, v in engine.log_settings(server.log_text()).items()},
    }
    own = Path(f"/proc/{server.pid}/environ").read_bytes().decode(errors="replace")
    pairs = (line.partition("=") for line in own.split("\0") if line)
    running = {name: value for name, _, value in sorted(pairs) if can_change(name)}
    environment = shown({name: without_root(value) for name, value in running.items()})
    return {
        "settings": {name: _setting(name, sources, engine) for name in SETTINGS},
        "environment": {"server": environment},
        "cleared": cleared_names(caller, server.environment.keys()),
    }


def remove_settings(folder: Path) -> None:
    """Delete what the settings probe wrote in a launch's folder; settings.json holds it."""
    for part in _PARTS:
        _probe_file(folder, part).unlink(missing_ok=True)


def _setting(
    name: str, sources: Mapping[str, Mapping[str, SettingRecord]], engine: Engine
) -> SettingRecord:
    """The first source that has it; else null and what each says to it."""
    told: list[SettingRecord] = [
        {"value": known[name]["value"], "source": source, "reason": known[name]["reason"]}
        for source, known in sources.items()
        if name in known
    ]
    for setting in told:
        if setting["value"] is not None:
            return setting
    if engine.lacks:
        reason = engine.lacks
    elif told:
        reason = "; ".join(f"{setting['source']}: {setting['reason']}" for setting in told)
    else:
        reason = "the probe is not in this server, and neither /metrics nor the log tells"
    return {"value": None, "source": None, "reason": reason}


def _of_probe(folder: Path, leader: int) -> dict[str, SettingRecord]:
    settings: dict[str, SettingRecord] = {}
    for part in _PARTS:
        path = _probe_file(folder, part)
        if not path.exists():
            continue
        written = json.loads(path.read_text(encoding="utf-8"))
        for name, (value, reason) in written["settings"].items():
            settings[name] = {"value": value, "source": None, "reason": reason}
        if part == "engine":
            same = written["pid"] == leader
            where = "the API server's" if same else "its own"
            settings["engine_core_process"] = _told(where)
    return settings


def _probe_file(folder: Path, part: str) -> Path:
    return folder / f"{STEP_LOG_PREFIX}.{part}.settings"


def _of_metrics(page: str | None) -> dict[str, SettingRecord]:
    # Imported late: the driver starts its server first.
    from prometheus_client.parser import text_string_to_metric_families

    if page is None:
        return {}
    try:
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    except ValueError:
        return {}
    labels = next((sample.labels for sample in samples if sample.name == _METRIC), {})
    settings: dict[str, SettingRecord] = {}
    for name, (label, parse) in _LABELS.items():
        # The API server prints None for what only the engine core has settled.
        if labels.get(label, "None") != "None":
            settings[name] = _told(parse(labels[label]))
    return settings


def _told(value: Any) -> SettingRecord:
    return {"value": value, "source": None, "reason": None}
