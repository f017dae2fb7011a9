"""The raw records of a synthetic study's cells: requests, metrics, steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connector_tax.artifacts.names import configuration_of
from connector_tax.artifacts.study_records import StudyDocument

PLAIN_CAPACITY_RPS = 110.0
STEP_US, MODEL_US = 1000.0, 4000.0
OUTSIDE = "nixl_both"
STACKED = "multi_mooncake_lmcache"
TAKE_EVENTS_US, WAIT_FOR_SAVE_US = 2.0, 20.0
CHILDREN = {"Mooncake": 0.25, "LMCache": 0.75}
TTFT_SIGMA, TPOT_SIGMA, STEP_SIGMA = 0.15, 0.05, 0.05

CellName = tuple[str, int, str, str]
Columns = dict[str, Sequence[Any] | np.ndarray[Any, Any]]


def write_lines(path: Path, *tables: Columns) -> None:
    """Write the rows of tables as JSON lines."""
    rows = [
        dict(zip(table, row, strict=True))
        for table in tables
        for row in zip(*(np.asarray(c, object).tolist() for c in table.values()), strict=True)
    ]
    path.write_bytes(msgspec.json.Encoder().encode_lines(rows))


TAXES = {
    "noop_connector": 0.10,
    "mooncake_producer": 0.20,
    "mooncake_consumer": 0.15,
    "mooncake_both": 0.45,
    "nixl_both": 0.38,
    "lmcache_only": 0.08,
    "multi_mooncake_lmcache": 0.53,
}


@dataclass
class Writer:
    """A writer of a study's records; time is virtual and only moves forward.

    Attributes:
        taxes: tax of each configuration as a fraction (0.45 is +45%); absent means 0.
        skipped: configuration to reason, as after a failed pre-flight gate.
        failed: (config, block, phase) to reason: a launch whose server died before any cell.
        void: (config, block, phase, cell) to reason; the cell is measured and not valid.
        step_timing: False writes no step records, and the reason into patch_status.json.
        launch_sigma: standard deviation of a launch's own log offset.
        ttft_growth: added to every non-zero TTFT tax per doubling of the input above 128 tokens.
        tpot_growth: added to every non-zero TPOT tax per doubling of the output above 16 tokens.
        steps_per_cell: scheduler steps in each cell; as many worker records.
        noise: factor on the standard deviations of requests and steps.
        nodes: the node of each block's launches; empty: not recorded.
    """

    root: Path
    document: StudyDocument
    seed: int
    taxes: Mapping[str, float] = field(default_factory=lambda: TAXES)
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[tuple[str, int, str], str] = field(default_factory=dict)
    void: Mapping[CellName, str] = field(default_factory=dict)
    step_timing: bool = True
    launch_sigma: float = 0.005
    ttft_growth: float = 0.0
    tpot_growth: float = 0.0
    steps_per_cell: int = 300
    noise: float = 1.0
    nodes: Sequence[Mapping[str, Any]] = ()
    now_ns: int = 10**15
    rates: Mapping[str, Any] = field(default_factory=dict)


def true_tax(
    taxes: Mapping[str, float], config: str, tokens: int, base_tokens: int, growth: float
) -> float:
    """Return the tax written into a cell: `growth` per doubling of `tokens` above `base_tokens`."""
    tax = taxes.get(configuration_of(config), 0.0)
    return tax + growth * float(np.log2(tokens / base_tokens)) if tax else 0.0


def request_records(
    writer: Writer,
    config: str,
    planned: Mapping[str, Any],
    rate: float,
    window: Mapping[str, Any],
    offset: float,
    rng: np.random.Generator,
) -> tuple[Columns, float]:
    span_s = (window["t_stop_ns"] - window["t_origin_ns"]) / 1e9
    n = int(np.ceil(rate * span_s - 1e-9))
    at_s = np.arange(n) / rate
    inputs, outputs = planned["input_tokens"], planned["output_tokens"]
    tax = writer.taxes.get(configuration_of(config), 0.0)
    ttft_factor = 1 + true_tax(writer.taxes, config, inputs, 128, writer.ttft_growth)
    tpot_factor = 1 + true_tax(writer.taxes, config, outputs, 16, writer.tpot_growth)
    behind = max(0.0, rate * (1 + tax) / PLAIN_CAPACITY_RPS - 1)
    ttft_s = (
        0.01
        * (inputs / 128) ** 0.5
        * ttft_factor
        * np.exp(rng.normal(offset, writer.noise * TTFT_SIGMA, n))
    )
    tpot_s = 0.002 * tpot_factor * np.exp(rng.normal(offset, writer.noise * TPOT_SIGMA, n))
    intended = window["t_origin_ns"] + np.round(at_s * 1e9).astype(np.int64)
    send = intended + rng.integers(50_000, 150_000, n)
    first = intended + np.round((ttft_s + behind * at_s) * 1e9).astype(np.int64)
    last = first + np.round(tpot_s * (outputs - 1) * 1e9).astype(np.int64)
    columns: Columns = {
        "request_id": [f"{config}-{i}" for i in range(n)],
        "seq": np.arange(n),
        "status": ["ok"] * n,
        "error_kind": [None] * n,
        "error_detail": [None] * n,
        "warmup": intended < window["t_warmup_end_ns"],
        "t_intended_ns": intended,
        "t_issue_ns": intended + 10_000,
        "t_worker_ns": intended + 30_000,
        "t_conn_ns": intended + 40_000,
        "t_send_ns": send,
        "t_headers_ns": first - 20_000,
        "t_first_token_ns": first,
        "t_last_token_ns": last,
        "t_done_ns": last + 10_000,
        "prompt_tokens": [inputs] * n,
        "completion_tokens": [outputs] * n,
        "inflight_at_send": [1] * n,
        "worker": [0] * n,
        "reads": [None] * n,
    }
    return columns, behind * PLAIN_CAPACITY_RPS


def write_metrics(path: Path, window: Mapping[str, Any], waiting_per_s: float) -> None:
    """Write a scrape each half second; the waiting queue grows by `waiting_per_s` every second."""
    lines = []
    stamps = range(window["t_origin_ns"], window["t_drained_ns"], 500_000_000)
    for stamp in stamps:
        waiting = waiting_per_s * (stamp - window["t_origin_ns"]) / 1e9
        values = {
            'vllm:num_requests_running{engine="0",model_name="synthetic"}': 4.0,
            'vllm:num_requests_waiting{engine="0",model_name="synthetic"}': float(round(waiting)),
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"}': 99.0,
        }
        record: dict[str, Any] = {"t_ns": stamp, "ok": True, "scrape_ms": 1.0, "values": values}
        if stamp in (stamps[0], stamps[-1]):
            record["raw"] = "# HELP synthetic\n"
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")


def write_steps(
    writer: Writer,
    path: Path,
    config: str,
    window: Mapping[str, Any],
    offset: float,
    rng: np.random.Generator,
) -> None:
    """Write scheduler records, then worker records; every tenth step is an empty polling step.

    A step is schedule() and then the model, MODEL_US long; a connector's tax is on schedule(), and
    another 100 us of it is outside schedule() in the configuration OUTSIDE. A connector's callbacks
    take 60% of the tax on schedule(): half in build_meta, a third in get_finished, a sixth in
    start_load_kv. The rest of the tax is in no callback. Of the other hooks take_events takes 2 us
    in the scheduler and wait_for_save 20 us in the worker; STACKED has all of build_meta in its
    children, a quarter of it in the first.
    """
    if not writer.step_timing:
        path.write_bytes(b"")
        return
    n = writer.steps_per_cell
    first_id = int(window["t_origin_ns"] // 10**6)
    stamps = np.linspace(window["t_origin_ns"], window["t_stop_ns"], n, endpoint=False).astype(
        np.int64
    )
    empty = np.arange(n) % 10 == 9
    tax = writer.taxes.get(configuration_of(config), 0.0)
    duration = STEP_US * (1 + tax) * np.exp(rng.normal(offset, writer.noise * STEP_SIGMA, n))
    duration[empty] = 20.0
    connector = configuration_of(config) != "plain"
    outside = 100.0 if config == OUTSIDE else 0.0
    model = (MODEL_US + outside) * np.exp(rng.normal(0, writer.noise * STEP_SIGMA, n))
    callbacks = 0.6 * tax * STEP_US * np.exp(rng.normal(0, 0.02, n))

    nothing = [None] * n

    def named(**times: np.ndarray[Any, Any]) -> list[dict[str, float]]:
        rows = zip(*(us.tolist() for us in times.values()), strict=True)
        return [dict(zip(times, row, strict=True)) for row in rows]

    noise = np.exp(rng.normal(offset, writer.noise * STEP_SIGMA, n))
    common = {"t_ns": stamps, "step_id": np.arange(first_id, first_id + n)}
    prefill = np.where(empty, 0, np.where(np.arange(n) % 3 == 0, 256, 0))
    scheduler: Columns = {
        **common,
        "process": ["scheduler"] * n,
        "step_duration_us": duration,
        "engine_step_us": duration + model,
        "build_meta_us": callbacks / 2 if connector else nothing,
        "get_finished_us": callbacks / 3 if connector else nothing,
        "start_load_kv_us": nothing,
        "num_running": np.where(empty, 0, 4),
        "num_waiting": np.zeros(n, dtype=np.int64),
        "prefill_tokens": prefill,
        "decode_tokens": np.where(empty, 0, 4),
        "hooks_us": named(take_events=TAKE_EVENTS_US * noise) if connector else nothing,
    }
    if config == STACKED:
        build_us = (callbacks / 2).tolist()
        scheduler["children_us"] = [
            {child: {"build_connector_meta": share * us} for child, share in CHILDREN.items()}
            for us in build_us
        ]
    worker: Columns = {
        **common,
        "process": ["worker"] * n,
        "step_duration_us": model,
        "build_meta_us": nothing,
        "get_finished_us": nothing,
        "start_load_kv_us": callbacks / 6 if connector else nothing,
        "num_running": nothing,
        "num_waiting": nothing,
        "prefill_tokens": nothing,
        "decode_tokens": nothing,
        "hooks_us": named(wait_for_save=WAIT_FOR_SAVE_US * noise) if connector else nothing,
    }
    write_lines(path, scheduler, worker)
