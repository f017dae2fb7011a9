"""analysis/resources.csv and engine.csv of a synthetic finished study."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from connector_tax.analysis.resources import RESOURCES

# Plain's value and the half width of an interval; None: read in no launch.
PLAIN: Mapping[str, tuple[float, float | None] | None] = {
    "idle_cpu": (0.021, 0.004),
    "cpu_s_per_1000": (34.2, 1.3),
    "engine_queued": (0.03, 0.01),
    "memory_pss_mib": (1915.7, 12.0),
    "memory_pss_loaded_mib": (1958.5, 14.0),
    "gpu_memory_mib": (88_412.0, 30.0),
    "kv_blocks": (65_536.0, None),
    "kv_tokens": (1_048_576.0, None),
    "threads": (65.0, None),
    "processes": (4.0, None),
    "startup_s": (21.4, 0.9),
}
ADDED: Mapping[str, Mapping[str, float]] = {
    "noop_connector": {"cpu_s_per_1000": 1.1},
    "mooncake_both": {"kv_blocks": -5120, "threads": 9, "startup_s": 2.5, "cpu_s_per_1000": 6.0},
    "nixl_both": {"idle_cpu": 0.452, "threads": 10, "memory_pss_mib": 61.0},
    "lmcache_only": {"idle_cpu": 0.03, "memory_pss_mib": 1454.6, "threads": 40, "startup_s": 19.0},
}


def resource_rows(
    configurations: Sequence[str], skipped: Mapping[str, str], blocks: int, plains: int
) -> Iterator[dict[str, Any]]:
    """A row for each configuration but plain and each resource, and of A/A."""
    for config in (*configurations, "plain_2")[: len(configurations) + (plains > 1)]:
        for resource in RESOURCES if config != "plain" else ():
            row: dict[str, Any] = {
                "quantity": "resource", "config": config, "phase": "A", "metric": resource.name,
                "unit": resource.unit, "scale": resource.scale, "n_blocks": 0,
            }  # fmt: skip
            given = PLAIN[resource.name]
            if config in skipped or given is None:
                reason = skipped.get(config, "no GPU: the engine's device is a CPU")
                yield row | {"status": "missing", "reason": reason}
                continue
            plain, half = given
            added = ADDED.get(config, {}).get(resource.name, 0.0)
            own = {"base": plain, "own": plain + added, "n_blocks": blocks, "status": "valid"}
            # On the scale of logs a share of plain's.
            whole = plain if resource.scale == "log" else 1.0
            yield row | own | _numbers(whole, half, added, blocks, config == "plain_2")


def _numbers(
    whole: float, half: float | None, difference: float, blocks: int, noise: bool
) -> dict[str, Any]:
    row = {"estimate": difference / whole, "method": "exact"}
    if half is None or blocks < 2:
        return row if half is None else row | {"method": ""}
    below, above = (1.2 * half, 1.1 * half) if noise else (half, half)
    ends = {"lo": (difference - below) / whole, "hi": (difference + above) / whole}
    return row | ends | {"method": "block model (df 17)", "p": 0.01, "df": 17}


def engine_rows(
    configurations: Sequence[str], skipped: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Three settings of each configuration; two connectors force another layout than plain's."""
    other = {"mooncake_both", "nixl_both"}
    for config in configurations:
        row = {"config": config}
        if config in skipped:
            yield row | {"reason": skipped[config]}
            continue
        layout = "HND" if config in other else "NHD"
        text = f"kv_cache_layout {layout} (plain NHD)" if config in other else ""
        for setting, value, plain in (
            ("kv_cache_layout", layout, "NHD"), ("block_size", "16", "16"),
            ("attention_backend", "FLASH_ATTN", "FLASH_ATTN"),
        ):  # fmt: skip
            differs = str(value != plain).lower()
            yield row | {"setting": setting, "value": value, "plain": plain, "differs": differs,
                         "source": "probe", "also_differs": text}  # fmt: skip
