"""Write a complete synthetic study folder with known taxes, as a measured study would have it.

Every latency is lognormal around a base that depends on the shape; a configuration's TTFT, TPOT and
step duration are exactly (1 + tax) times plain's, so the true tax is known at every rate below
saturation. Above its capacity a server falls behind linearly, so that the saturation criteria fire.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connector_tax.analysis import aggregate
from connector_tax.analysis.reference import rates_of
from connector_tax.artifacts import paths
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.index import CellEntry, finished_cell, launch_index, write_index
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import (
    PHASES,
    REFERENCE_OF,
    Launch,
    baseline_of,
    configuration_of,
    plain_names,
)
from connector_tax.artifacts.study_file import cell_rates, shape_limits
from connector_tax.artifacts.study_records import EIGHT
from connector_tax.files import sha256_file, write_json
from connector_tax.seeds import named_generator
from connector_tax.study.design import cells_of
from connector_tax.study.shape_rates import shape_rates_content, shapes_of
from tests.analysis.synthetic_records import (
    Writer,
    request_records,
    write_lines,
    write_metrics,
    write_steps,
)
from tests.study_folder import DEFAULT, study_document, write_stages

CONFIGURATIONS = tuple(EIGHT)
CONFIG: dict[str, Any] = {
    "study": "synthetic",
    "arrivals": {"process": "fixed", "gamma_shape": None},
    "phase_a": {"rates_rps": [20.0, 40.0, 80.0, 160.0], "input_tokens": 256, "output_tokens": 32},
    "phase_b": {"input_tokens": [128, 512], "output_tokens": [16, 64]},
    "phase_bp": {
        "configurations": ["plain", "mooncake_both", "nixl_both", "lmcache_only"],
        "shapes": [[128, 16], [256, 32], [512, 64]],
    },
    "cell": {
        **DEFAULT["cell"],
        **{"warmup_s": 0.5, "floor_s": 3.0, "cap_s": 10.0, "min_completed": 80},
    },
    "saturation": DEFAULT["saturation"],
    "reference": {"fallback_rps": None},
    "statistics": {**DEFAULT["statistics"], "margins": dict.fromkeys(METRICS, 0.03)},
    "hypotheses": DEFAULT["hypotheses"],
}

# A grid for tests that need no curve: two rates, two shapes, one of them at high load.
SMALL_GRID: Mapping[str, Any] = {
    "phase_a": {"rates_rps": [40.0, 80.0]},
    "phase_b": {"output_tokens": [16]},
    "phase_bp": {"shapes": [[128, 16]]},
}
# Throughput of plain for each shape, in a study with `shape_rates`.
SERVED_RPS = {"128x16": 200.0, "512x16": 60.0}


def write_analysed_study(root: Path, **given: Any) -> Path:
    """Write a synthetic study and its analysis."""
    study_file = write_synthetic_study(root, **given)
    assert aggregate.main(["--study", str(study_file)]) == 0
    return study_file


def write_synthetic_study(
    root: Path,
    *,
    seed: int = 1,
    blocks: int = 1,
    plain_launches: int = 2,
    config: Mapping[str, Any] | None = None,
    **given: Any,
) -> Path:
    """Write `root/study.json` and everything around it; returns the path of study.json.

    Args:
        seed: same seed and arguments, same bytes.
        config: sections that replace CONFIG's, merged key by key.
        given: fields of Writer.

    The shape and the rates come from CONFIG, and reference_rates.json from the analysis.
    """
    document = _document(seed, blocks, plain_launches, config or {})
    writer = Writer(root=root, document=document, seed=seed, **given)
    study_file = write_stages(root, document, writer.skipped, step_timing=writer.step_timing)
    _write_phase(writer, "A")
    # Not derived by the command, which refuses while launches have failed.
    writer.rates = rates_of(StudyFolder.load(study_file))
    write_json(root / paths.REFERENCE_RATES, writer.rates)
    if document["config"].get("shape_rates"):
        served = {name: [1 / SERVED_RPS[name]] for name in shapes_of(document)}
        write_json(root / paths.SHAPE_RATES, shape_rates_content(document, served))
    for phase in ("B", "Bp"):
        _write_phase(writer, phase)
    return study_file


def _document(seed: int, blocks: int, plain_launches: int, overrides: Mapping[str, Any]) -> Any:
    config: Any = {
        key: {**value, **overrides.get(key, {})} if isinstance(value, dict) else value
        for key, value in CONFIG.items()
    }
    config |= {key: value for key, value in overrides.items() if key not in CONFIG}
    config |= {"seed": seed, "blocks": blocks, "plain_launches": plain_launches}
    config["configurations"] = list(CONFIGURATIONS)
    cells = {phase: cells_of(config, phase) for phase in PHASES}
    members = {phase: list(CONFIGURATIONS) for phase in PHASES}
    members["Bp"] = config["phase_bp"]["configurations"]
    order = [
        Launch(name, block, phase)
        for phase in PHASES
        for block in range(blocks)
        for name in (*members[phase], *plain_names(plain_launches, baseline_of(config))[1:])
    ]
    design = hashlib.sha256(f"synthetic {seed}".encode()).hexdigest()
    labels = {name: name.replace("_", " ") for name in CONFIGURATIONS}
    return study_document(config, labels, cells, order, design_sha256=design)


def _write_phase(writer: Writer, phase: str) -> None:
    for entry in writer.document["run_order"][phase]:
        _write_launch(writer, entry["config"], entry["block"], phase)


def _write_launch(writer: Writer, config: str, block: int, phase: str) -> None:
    folder = Launch(config, block, phase).folder(writer.root)
    folder.mkdir(parents=True)
    rate = writer.rates[REFERENCE_OF[phase]] if phase in REFERENCE_OF else None
    status, reason = "done", None
    if config in writer.skipped:
        status, reason = "skipped", writer.skipped[config]
    elif (config, block, phase) in writer.failed:
        status, reason = "failed", writer.failed[config, block, phase]
    elif phase == "Bp" and writer.rates["ref_load"] == writer.rates["ref_safe"]:
        status, reason = "skipped", "ref_load equals ref_safe"
    planned = writer.document["cells"][phase]
    limits = shape_limits(writer.document, writer.root, phase)
    rates = cell_rates(writer.document, phase, rate, limits)
    if status == "done":
        for name in ("vllm_stdout.log", "vllm_stderr.log", "env.txt"):
            (folder / name).write_text("synthetic\n")
        (folder / "launch.sh").write_text("#!/bin/sh\n")
        _dump(folder / "config.json", {"config": config})
        _dump(folder / "summary.json", {})
        offset = named_generator(f"{writer.seed}/launch/{config}/{block}/{phase}").normal(
            0, writer.launch_sigma
        )
        cells = [
            _write_cell(writer, folder, config, block, phase, c, rates[c["cell"]], offset)
            for c in planned
        ]
    else:
        lost = "skipped" if status == "skipped" else "missing"
        cells = [CellEntry(c["cell"], lost, reason, {}) for c in planned]
    index = launch_index(
        writer.document,
        Launch(config, block, phase),
        cells,
        status=status,
        reason=reason,
        rate_rps=rate,
        started_utc="2026-01-01T00:00:00+00:00",
        ended_utc="2026-01-01T00:01:00+00:00",
        attempts=[{"node": writer.nodes[block]}] if writer.nodes and status == "done" else [],
    )
    write_index(folder, index)


def _write_cell(
    writer: Writer,
    launch_folder: Path,
    config: str,
    block: int,
    phase: str,
    planned: Mapping[str, Any],
    rate: float | None,
    offset: float,
) -> CellEntry:
    name = planned["cell"]
    folder = launch_folder / name
    folder.mkdir()
    assert rate is not None
    rules = writer.document["config"]["cell"]
    window_s = min(max(rules["floor_s"], rules["min_completed"] / rate), rules["cap_s"])
    origin = writer.now_ns
    window: dict[str, Any] = {
        "t_origin_ns": origin,
        "t_warmup_end_ns": origin + round(rules["warmup_s"] * 1e9),
        "t_stop_ns": origin + round((rules["warmup_s"] + window_s) * 1e9),
        "t_drained_ns": origin + round((rules["warmup_s"] + window_s + 1) * 1e9),
        "started_utc": _utc(origin),
    }
    window["t_cooldown_end_ns"] = window["t_stop_ns"]
    writer.now_ns = window["t_drained_ns"] + 10**9
    rng = named_generator(f"{writer.seed}/{config}/{block}/{phase}/{name}")
    suffix = f"{phase}_{name}.jsonl"
    requests, waiting = request_records(writer, config, planned, rate, window, offset, rng)
    write_lines(folder / f"requests_{suffix}", requests)
    write_metrics(folder / f"metrics_{suffix}", window, waiting)
    write_steps(writer, folder / f"engine_step_{suffix}", config, window, offset, rng)
    reason = writer.void.get((config, block, phase, name))
    n = len(requests["seq"])
    warm = n - sum(map(bool, requests["warmup"]))
    record: Any = {
        "phase": phase,
        "cell": name,
        "config": config,
        "configuration": configuration_of(config),
        "block": block,
        "label": writer.document["engine_label"],
        "input_tokens": planned["input_tokens"],
        "output_tokens": planned["output_tokens"],
        "schedule": {"kind": "fixed", "rate_rps": rate, "seed": "synthetic", "n": n},
        "window": window,
        "counts": {
            "planned": n,
            "sent": n,
            "ok": n,
            "dropped": 0,
            "failed": {},
            "measured_ok": warm,
        },
        "extended_s": window_s - rules["floor_s"],
        "health": {"early_send_ms": {"value": 0.0, "bound": 0.0, "pass": True}},
        "valid": reason is None,
        "void_reasons": [] if reason is None else [reason],
        "server_counters": {"before": {}, "after": {}},
        "clock": "CLOCK_MONOTONIC",
        "attempt": 1,
    }
    record["files"] = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    _dump(folder / paths.cell_record(phase, name), record)
    return finished_cell(record, folder)


def _utc(origin_ns: int) -> str:
    seconds = (origin_ns - 10**15) // 10**9
    clock = f"{9 + seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"2026-05-26T{clock}.000+00:00"


def _dump(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
