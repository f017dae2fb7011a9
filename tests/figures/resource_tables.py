"""analysis/resources.csv and engine.csv of a synthetic finished study."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from connector_tax.analysis.resources import RESOURCES

# Plain's value and the half width of an interval; None: read in no launch.
PLAIN: Mapping[str, tuple[float, float | None] | None] = {
    "idle_cpu": (0.021, 0.004),
    "cpu_s_per_1000": (34.2, 1.3),
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
    configurations: Sequence[str], skipped: Mapping[str, str], blocks: int
) -> Iterator[dict[str, Any]]:
    """A row for each configuration but plain and each resource."""
    for config in configurations:
        for resource in RESOURCES if config != "plain" else ():
            row: dict[str, Any] = {
                "config": config, "resource": resource.name, "unit": resource.unit,
                "scale": resource.scale, "companions": "", "n_launches": 0, "n_blocks": 0,
            }  # fmt: skip
            given = PLAIN[resource.name]
            if config in skipped or given is None:
                reason = skipped.get(config, "no GPU: the engine's device is a CPU")
                yield row | {"status": "missing", "reason": reason}
                continue
            plain, half = given
            yield row | _numbers(plain, half, ADDED.get(config, {}).get(resource.name, 0.0), blocks)


def _numbers(plain: float, half: float | None, difference: float, blocks: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "plain_mean": plain, "config_mean": plain + difference, "difference": difference,
        "tax": difference / plain, "n_blocks": blocks, "n_launches": 3 * blocks,
        "status": "valid", "aa_difference": 0.0, "aa_tax": 0.0, "interval_method": "exact",
    }  # fmt: skip
    if half is None or blocks < 2:
        return row if half is None else row | {"interval_method": ""}
    ends = {"difference_lo": difference - half, "difference_hi": difference + half}
    ends |= {"tax_lo": (difference - half) / plain, "tax_hi": (difference + half) / plain}
    ends |= {"aa_difference_lo": -1.2 * half, "aa_difference_hi": 1.1 * half}
    return row | ends | {"interval_method": "block model", "p_value": 0.01}


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
