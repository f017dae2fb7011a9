"""A study folder for the benchmark: many cells over one set of raw files, linked into each."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from connector_tax.artifacts.index import CellEntry, launch_index, write_index
from connector_tax.artifacts.metrics import METRICS
from connector_tax.artifacts.names import REFERENCES, Launch
from connector_tax.files import write_json

STATISTICS: dict[str, Any] = {
    "confidence": 0.95,
    "margins": dict.fromkeys(METRICS, 0.03),
    "confirmatory": list(REFERENCES),
    "p99_min_samples": 1000,
}
CONFIGS = ("plain", *(f"config_{i}" for i in range(1, 10)))
BLOCKS = 10
RATE_RPS = 100.0
ORIGIN_NS = 10**15


def write_study(root: Path, steps: int, requests: int) -> tuple[Path, float]:
    """Write a study with `steps` step records and `requests` requests in each cell.

    Returns:
        the path of study.json, and the megabytes of raw records all cells hold together.
    """
    raw = root / "raw"
    raw.mkdir()
    stop_ns = ORIGIN_NS + round(requests / RATE_RPS * 1e9)
    _write_requests(raw / "requests_A_r100.jsonl", requests)
    _write_steps(raw / "engine_step_A_r100.jsonl", steps, stop_ns)
    _write_metrics(raw / "metrics_A_r100.jsonl", stop_ns)
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(raw.iterdir())}
    size_mb = sum(p.stat().st_size for p in raw.iterdir()) / 1e6
    for config in CONFIGS:
        for block in range(BLOCKS):
            _write_launch(root, config, block, raw, hashes, stop_ns)
    write_json(root / "preflight" / "preflight_status.json", {})
    write_json(root / "patch" / "patch_status.json", {"step_timing_available": True})
    rates = {"ref_safe": RATE_RPS, "ref_load": RATE_RPS, "saturation_rate_rps": {}}
    write_json(root / "reference_rates.json", rates)
    write_json(root / "study.json", _document())
    return root / "study.json", size_mb * len(CONFIGS) * BLOCKS


def _document() -> dict[str, Any]:
    limits = {
        "h1_min_tax": 0.1,
        "h1_prior_band": [0.25, 0.6],
        "h2_prior_gap_pp": 7.0,
        "h2_gap_band_pp": [5.0, 10.0],
        "h3_framework_share": 0.5,
        "h3_implementation_share": 0.3,
        "h4_tolerance": 0.3,
        "max_hours": 6.0,
        "prior": {
            "plain_ttft_p90_s": 7.35,
            "nixl_ttft_p90_s": 10.1,
            "mooncake_both_ttft_p90_s": 10.67,
        },
    }
    cell = {"cell": "r100", "rate_rps": RATE_RPS, "input_tokens": 512, "output_tokens": 64}
    order = [{"config": c, "block": b} for b in range(BLOCKS) for c in CONFIGS]
    return {
        "design_sha256": "0",
        "engine_label": "synthetic",
        "emulated": True,
        "seed": 1,
        "blocks": BLOCKS,
        "config": {
            "statistics": STATISTICS,
            "hypotheses": limits,
            "reference": {"fallback_rps": None},
            "saturation": {
                "throughput_ratio_min": 0.95,
                "waiting_p50_max": 1.0,
                "ttft_p90_ratio_max": 1.5,
            },
        },
        "configurations": [{"id": config} for config in CONFIGS],
        "run_order": {"A": order, "B": [], "Bp": []},
        "cells": {"A": [cell], "B": [], "Bp": []},
    }


def _write_launch(
    root: Path, config: str, block: int, raw: Path, hashes: dict[str, str], stop_ns: int
) -> None:
    launch = Launch(config, block, "A").folder(root)
    folder = launch / "r100"
    folder.mkdir(parents=True)
    for name in hashes:
        (folder / name).hardlink_to(raw / name)
    where = {"config": config, "block": block, "phase": "A"}
    record: dict[str, Any] = {
        **where,
        "cell": "r100",
        "schedule": {"rate_rps": RATE_RPS},
        "window": {
            "t_origin_ns": ORIGIN_NS,
            "t_warmup_end_ns": ORIGIN_NS,
            "t_stop_ns": stop_ns,
            "t_drained_ns": stop_ns,
            "started_utc": "2026-05-26T09:00:00+00:00",
        },
        "counts": {},
        "valid": True,
        "void_reasons": [],
    }
    path = folder / "cell_A_r100.json"
    write_json(path, record)
    files = {**hashes, path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    index = launch_index(
        {"engine_label": "synthetic", "design_sha256": "0"},
        Launch(config, block, "A"),
        [CellEntry("r100", "valid", None, files)],
        started_utc=record["window"]["started_utc"],
    )
    write_index(launch, index)


def _write_requests(path: Path, n: int) -> None:
    rng = np.random.default_rng(2)
    intended = ORIGIN_NS + np.arange(n, dtype=np.int64) * round(1e9 / RATE_RPS)
    first = intended + rng.integers(40_000_000, 60_000_000, n)
    last = first + rng.integers(400_000_000, 500_000_000, n)
    stamps = {
        "t_intended_ns": intended,
        "t_issue_ns": intended + 10_000,
        "t_worker_ns": intended + 20_000,
        "t_conn_ns": intended + 30_000,
        "t_send_ns": intended + 40_000,
        "t_headers_ns": first - 10_000,
        "t_first_token_ns": first,
        "t_last_token_ns": last,
        "t_done_ns": last + 10_000,
    }
    pl.DataFrame(
        {
            "request_id": [f"request-{i}" for i in range(n)],
            "seq": np.arange(n),
            "status": ["ok"] * n,
            "error_kind": pl.Series([None] * n, dtype=pl.String),
            "error_detail": pl.Series([None] * n, dtype=pl.String),
            "warmup": [False] * n,
            **stamps,
            "prompt_tokens": [512] * n,
            "completion_tokens": [64] * n,
            "inflight_at_send": [40] * n,
            "worker": [0] * n,
            "reads": pl.Series([None] * n, dtype=pl.List(pl.List(pl.Int64))),
        }
    ).write_ndjson(path)


def _write_steps(path: Path, records: int, stop_ns: int) -> None:
    """Half of the records by the scheduler, half by the worker; every tenth step is empty."""
    rng = np.random.default_rng(3)
    n = records // 2
    stamps = np.linspace(ORIGIN_NS, stop_ns, n, endpoint=False).astype(np.int64)
    empty = np.arange(n) % 10 == 9
    nothing = pl.Series([None] * n, dtype=pl.Float64)
    timing = {
        name: np.round(base * np.exp(rng.normal(0, 0.1, n)), 3)
        for name, base in (
            ("step", 900.0),
            ("engine", 9000.0),
            ("build", 40.0),
            ("finished", 25.0),
            ("load", 12.0),
        )
    }
    with path.open("wb") as stream:
        for process in ("scheduler", "worker"):
            scheduler = process == "scheduler"
            pl.DataFrame(
                {
                    "t_ns": stamps,
                    "step_id": np.arange(n),
                    "process": [process] * n,
                    "step_duration_us": timing["step"],
                    "engine_step_us": timing["engine"] if scheduler else nothing,
                    "build_meta_us": timing["build"] if scheduler else nothing,
                    "get_finished_us": timing["finished"] if scheduler else nothing,
                    "start_load_kv_us": nothing if scheduler else timing["load"],
                    "num_running": np.full(n, 40),
                    "num_waiting": np.zeros(n, dtype=np.int64),
                    "prefill_tokens": np.where(empty, 0, 512),
                    "decode_tokens": np.where(empty, 0, 40),
                }
            ).write_ndjson(stream)


def _write_metrics(path: Path, stop_ns: int) -> None:
    line = '{{"t_ns": {}, "ok": true, "values": {{"vllm:num_requests_waiting": 0}}}}\n'
    path.write_text("".join(line.format(t) for t in range(ORIGIN_NS, stop_ns, 10**9)))
