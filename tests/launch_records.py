"""Make records of synthetic launches: resources.json, settings.json, and cells' CPU time."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connector_tax.files import read_json, sha256_file, write_json
from connector_tax.seeds import named_generator

NO_GPU = "no GPU: the engine's device is a CPU"
# Added to plain's values by configuration and resource.
ADDED: Mapping[str, Mapping[str, float]] = {
    "nixl_both": {"idle_cpu": 0.45, "memory_pss_mib": 70.0},
    "mooncake_both": {"kv_blocks": -800},
    "lmcache_only": {"idle_cpu": 0.03, "memory_pss_mib": 1400.0},
}
PLAIN = {
    "idle_cpu": 0.02,
    "memory_pss_mib": 1900.0,
    "startup_s": 21.0,
    "kv_blocks": 8192,
}


def quantity(value: Any) -> dict[str, Any]:
    """Return a quantity from a number, (value, reason) or (value, reason, parts)."""
    value, reason, *parts = value if isinstance(value, tuple) else (value, None)
    whole = {} if value is None else {"server": value}
    return {"value": value, "parts": parts[0] if parts else whole, "reason": reason}


def resources_record(**given: Any) -> Any:
    """Return resources.json, in which quantities that are not given are 1."""
    names = ("memory_pss_mib", "gpu_memory_mib")
    taken = {name: quantity(given.pop(name, 1.0)) for name in names}
    idle = {
        "from_ns": 1_000 - 2_000_000_000,
        "to_ns": 1_000,
        **quantity(given.pop("idle_cpu", 1.0)),
    }
    return {
        "startup_s": given.pop("startup_s", 1.0),
        "idle_cpu": idle,
        "before_load": taken,
        "after_load": given.pop("after_load", taken),
        "after_load_reason": None,
    }


def settings_record(layout: str = "NHD", backend: str | None = None, blocks: int = 8192) -> Any:
    """Return the settings of settings.json: three known, one that may be missing."""

    def setting(value: Any) -> dict[str, Any]:
        known = value is not None
        reason = None if known else "no such setting"
        return {"value": value, "source": "probe" if known else None, "reason": reason}

    return {
        "kv_blocks": setting(blocks),
        "kv_tokens": setting(16 * blocks),
        "layout": setting(layout),
        "backend": setting(backend),
        "prefix_caching": setting(True),
    }


def complete_launches(root: Path, phase: str = "*") -> None:
    """Apply `complete_launch` to every launch of a synthetic study, or of one phase."""
    for index_file in sorted(root.glob(f"runs/*/*/{phase}/index.json")):
        complete_launch(index_file)


def complete_launch(index_file: Path) -> None:
    """Add the records of resources and settings to a measured synthetic launch, and CPU time to its
    cells.
    """
    index = read_json(index_file)
    index["files"] = {}
    if index["status"] == "done":
        _complete(index_file.parent, index)
    write_json(index_file, index)


def _complete(folder: Path, index: dict[str, Any]) -> None:
    name = f"{index['config']}/block{index['block']}/{index['phase']}"
    random = named_generator(f"launch records {name}")
    added = ADDED.get(index["configuration"], {})
    values = {key: value + added.get(key, 0) for key, value in PLAIN.items()}
    blocks = int(values.pop("kv_blocks"))
    for key in ("idle_cpu", "memory_pss_mib", "startup_s"):
        values[key] *= math.exp(random.normal(0, 0.02))
    layout = "HND" if index["configuration"] in ("mooncake_both", "nixl_both") else "NHD"
    resources = resources_record(**values, gpu_memory_mib=(None, NO_GPU))
    of_launch = {"launch": name, "attempt": 1}
    settings = {
        "settings": settings_record(layout, None, blocks),
        "environment": {"server": {}},
    }
    write_json(folder / "resources.json", of_launch | resources)
    write_json(folder / "settings.json", of_launch | settings)
    for record_name in ("resources.json", "settings.json"):
        index["files"][record_name] = sha256_file(folder / record_name)
    for entry in index["cells"]:
        path = folder / entry["cell"] / f"cell_{index['phase']}_{entry['cell']}.json"
        record = read_json(path)
        record["server_cpu"] = cell_cpu_record(record, 6.0 * math.exp(random.normal(0, 0.03)))
        write_json(path, record)
        entry["files"][path.name] = sha256_file(path)


def cell_cpu_record(record: dict[str, Any], cpu_s: float) -> dict[str, Any]:
    """Return a cell's CPU time record, with readings just before and after the cell."""
    window = record["window"]
    counters = record["server_counters"]
    requests = float(record["counts"]["ok"])
    if "success" in counters["after"]:
        requests = counters["after"]["success"] - counters["before"]["success"]
    return {
        "from_ns": window["t_origin_ns"] - 1_000_000,
        "to_ns": window["t_drained_ns"] + 1_000_000,
        "cpu_s": cpu_s,
        "requests": requests,
        "cpu_s_per_1000": quantity(1000 * cpu_s / requests),
    }
