"""resources.csv and engine.csv a second time: from the launches' records to the published rows.

The block model is the audit's own (`layout`); docs/method.md, "Resources", says what is computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from connector_tax.artifacts.names import configuration_of, launched_plains
from connector_tax.files import read_json
from connector_tax.provenance.audit_study import RawLaunch, RawStudy
from connector_tax.provenance.device_spread import difference
from connector_tax.provenance.layout import plain_values
from connector_tax.provenance.recompute import Row

UNITS = {
    "idle_cpu": "CPU s per s",
    "cpu_s_per_1000": "CPU s per 1000 requests",
    "memory_pss_mib": "MiB",
    "memory_pss_loaded_mib": "MiB",
    "gpu_memory_mib": "MiB",
    "kv_blocks": "blocks",
    "kv_tokens": "tokens",
    "threads": "threads",
    "processes": "processes",
    "startup_s": "s",
}
Place = tuple[str, int]  # launch name, block


def recorded(launch: RawLaunch, name: str) -> Row | None:
    """A record of a launch that its index vouches for; None where it has none."""
    if launch.index is None or name not in (launch.index.recorded or {}):
        return None
    record: Row = read_json(launch.folder / name)
    return record


class Resources:
    """Every resource of every launch of Phase A."""

    def __init__(self, study: RawStudy, cell: str | None) -> None:
        """`cell`: the Phase A cell at ref_safe; None where that rate is not in the grid."""
        self.study = study
        self.confidence: float = study.config["statistics"]["confidence"]
        self.launches = [launch for launch in study.launches if launch.phase == "A"]
        self.plain = launched_plains((la.config for la in self.launches), study.baseline)[-1]
        self.values: dict[str, dict[Place, float]] = {name: {} for name in UNITS}
        self.parts: dict[str, dict[Place, Mapping[str, float]]] = {name: {} for name in UNITS}
        for launch in self.launches:
            if any(c.measured for c in study.cells if c.launch is launch):
                self._read(launch, cell)

    def _read(self, launch: RawLaunch, cell: str | None) -> None:
        place = (launch.config, launch.block)
        for name, quantity in quantities(self.study, launch, cell).items():
            value = quantity["value"]
            self.parts[name][place] = quantity["parts"]
            if value is not None and (name == "idle_cpu" or value > 0):
                self.values[name][place] = float(value)

    def rows(self) -> list[Row]:
        """The rows of resources.csv."""
        names = dict.fromkeys(launch.config for launch in self.launches)
        configs = [name for name in names if configuration_of(name) != self.study.baseline]
        return [self._row(config, resource) for config in configs for resource in UNITS]

    def _row(self, config: str, name: str) -> Row:
        scale = "raw" if name == "idle_cpu" else "log"
        row: Row = {"config": config, "resource": name, "unit": UNITS[name], "scale": scale}
        row |= {"status": "missing", "n_blocks": 0, "n_launches": 0}
        row |= {"companions": self._companions(config, name)}
        own = self._effect(name, config, "")
        if own is None:
            return row
        noise = self._effect(name, self.plain, "aa_") or {}
        noise = {key: value for key, value in noise.items() if key.startswith("aa_")}
        return row | own | noise | {"status": "valid"}

    def _effect(self, name: str, ours: str, prefix: str) -> Row | None:
        """A launch against the others of plain in its blocks: means, difference, tax, interval."""
        values, raw = self.values[name], name == "idle_cpu"
        y = values if raw else {place: math.log(value) for place, value in values.items()}
        baseline = self.study.baseline
        effect = difference(y, ours, self.confidence, baseline, self.study.devices)
        plains = plain_values(y, ours, baseline)
        if effect is None:
            return None
        mine = [y[ours, block] for block in plains]
        theirs = [value for side in plains.values() for value in side]
        repeated = len({block for _, block in values}) > 1
        if repeated and len(set(mine)) == len(set(theirs)) == 1:
            effect = replace(effect, low=None, high=None, p=None, method="exact")
        mean_of = np.mean if raw else lambda v: math.exp(float(np.mean(v)))
        plain_mean = float(mean_of([np.mean(side) for side in plains.values()]))
        row: Row = {
            "plain_mean": plain_mean, "config_mean": float(mean_of(mine)), "p_value": effect.p,
            "interval_method": effect.method, "n_blocks": len(plains),
            "n_launches": len(mine) + len(theirs),
        }  # fmt: skip
        for end, value in (("", effect.point), ("_lo", effect.low), ("_hi", effect.high)):
            tax = None if raw or value is None else math.expm1(value)
            row[f"{prefix}tax{end}"] = tax
            row[f"{prefix}difference{end}"] = value if tax is None else plain_mean * tax
        return row

    def _companions(self, config: str, name: str) -> str | None:
        mine = [parts for (launch, _), parts in self.parts[name].items() if launch == config]
        names = sorted({part for parts in mine for part in parts} - {"server"})
        texts = [f"{n} {np.mean([parts.get(n, 0.0) for parts in mine]):.4g}" for n in names]
        return "; ".join(texts) or None


def quantities(study: RawStudy, launch: RawLaunch, cell: str | None) -> dict[str, Row]:
    """The resources of one launch that was recorded, by name: value and parts."""
    resources, settings = (recorded(launch, f"{n}.json") for n in ("resources", "settings"))
    if resources is None or settings is None:
        return {}
    nothing: Row = {"value": None, "parts": {}}
    before, after = resources["before_load"], resources["after_load"] or {}
    taken: dict[str, Row] = {
        "idle_cpu": resources["idle_cpu"],
        "memory_pss_loaded_mib": after.get("memory_pss_mib", nothing),
        "startup_s": {"value": resources["startup_s"], "parts": {}},
    }
    for name in ("memory_pss_mib", "gpu_memory_mib", "threads", "processes"):
        taken[name] = before[name]
    for name in ("kv_blocks", "kv_tokens"):
        taken[name] = {"value": settings["settings"][name]["value"], "parts": {}}
    taken["cpu_s_per_1000"] = nothing
    for candidate in study.cells:
        if candidate.launch is launch and candidate.cell == cell and candidate.status == "valid":
            taken["cpu_s_per_1000"] = candidate.record["server_cpu"]["cpu_s_per_1000"]
    return taken


def engine_rows(study: RawStudy) -> list[Row]:
    """The rows of engine.csv."""
    groups: dict[str, list[Row]] = {}
    for launch in study.launches:
        if launch.phase == "A":
            mine = groups.setdefault(configuration_of(launch.config), [])
            record = recorded(launch, "settings.json")
            mine += [] if record is None else [record["settings"]]
    names = next((list(records[0]) for records in groups.values() if records), [])
    rows: list[Row] = []
    for config, records in groups.items():
        if not records:
            rows.append({"config": config, "setting": ""})
            continue
        own: list[Row] = []
        for name in names:
            value, plain = (_value(r, name) for r in (records, groups.get(study.baseline, [])))
            sources = {r[name]["source"] for r in records} - {None}
            own.append({
                "config": config, "setting": name, "value": value, "plain": plain,
                "differs": None if value is None or plain is None else value != plain,
                "source": ", ".join(sorted(sources)) or None,
            })  # fmt: skip
        changed = [
            f"{r['setting']} {r['value']} ({study.baseline} {r['plain']})"
            for r in own
            if r["differs"]
        ]
        rows += [row | {"also_differs": "; ".join(changed) or None} for row in own]
    return rows


def _value(records: Sequence[Row], name: str) -> str | None:
    known = {r[name]["value"] for r in records if r[name]["value"] is not None}
    texts = {str(v).lower() if isinstance(v, bool) else str(v) for v in known}
    return " | ".join(sorted(texts)) or None
