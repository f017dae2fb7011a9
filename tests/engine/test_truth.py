"""Test that step log and truth log are complete, consistent, and match the injected tax."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_tax.config import ROOT, ConfigError, filled, load_yaml
from connector_tax.engine.config import load_config
from connector_tax.engine.connectors import ConnectorTax, taxes_of_step
from connector_tax.engine.model import StepClock, StepCost
from tests.engine.serving import Launched, config_with, launched

EXACT = {"jitter_rel_sd": 0.0, "launch_offset_rel_sd": 0.0}


def run_three(folder: Path, configuration: str, changes: dict[str, Any]) -> Launched:
    with launched(folder, configuration, changes) as server:
        for prompt in range(3):
            server.stream(prompt=[prompt] * 48, max_tokens=10)
        assert server.stop() == 0
    return server


@pytest.fixture(scope="module")
def taxed(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return run_three(tmp_path_factory.mktemp("taxed"), "mooncake_both", {"step_cost": EXACT})


def test_step_records_have_the_declared_fields(taxed: Launched) -> None:
    scheduler, worker = (taxed.records(f"step.{p}.jsonl") for p in ("scheduler", "worker"))
    assert len(scheduler) == len(worker) == 30
    for host, device in zip(scheduler, worker, strict=True):
        assert host["step_id"] == device["step_id"]
        assert (host["process"], device["process"]) == ("scheduler", "worker")
        assert host["start_load_kv_us"] is None
        assert device["build_meta_us"] is device["get_finished_us"] is None
        assert device["num_running"] is device["num_waiting"] is None
        assert device["t_ns"] > host["t_ns"]
        assert host["engine_step_us"] > host["step_duration_us"] + device["step_duration_us"]
        assert device["engine_step_us"] is None
    prefills = [r for r in scheduler if r["prefill_tokens"]]
    assert [r["prefill_tokens"] for r in prefills] == [48, 48, 48]
    assert sum(r["decode_tokens"] for r in scheduler) == 27
    assert all(r["num_running"] == 1 and r["num_waiting"] == 0 for r in scheduler)


def test_step_log_contains_the_injected_tax(taxed: Launched) -> None:
    launch = taxed.records("truth.jsonl")[0]
    tax = ConnectorTax(**launch["tax"])
    cached = 0
    for record in taxed.records("step.scheduler.jsonl"):
        admitted = 1 if record["prefill_tokens"] else 0
        assert record["build_meta_us"] == pytest.approx(taxes_of_step(tax, cached, admitted)[0])
        assert record["get_finished_us"] == tax.get_finished_us
        cached += 3 * admitted  # three full blocks of each prompt
    worker = taxed.records("step.worker.jsonl")
    assert {r["start_load_kv_us"] for r in worker} == {tax.start_load_kv_us}


def test_a_step_ends_at_its_modelled_deadline(taxed: Launched) -> None:
    launch = taxed.records("truth.jsonl")[0]
    cost, tax = launch["step_cost"], launch["tax"]
    deadlines = [w[2] for r in taxed.records("truth.jsonl")[1:] for w in r["writes"] if w[1]]
    for record, deadline in zip(taxed.records("step.scheduler.jsonl"), deadlines, strict=True):
        modelled_us = (
            cost["delta_us"]
            + cost["beta0_us"]
            + cost["beta1_us_per_prefill_token"] * record["prefill_tokens"]
            + cost["beta2_us_per_decode_seq"] * record["decode_tokens"]
            + cost["beta3_us_per_kv_token"] * record["kv_tokens"]
            + record["build_meta_us"]
            + record["get_finished_us"]
            + tax["start_load_kv_us"]
        )
        assert (deadline - record["t_ns"]) / 1000 == pytest.approx(modelled_us, abs=0.01)
        # Never early, and late only because of the machine.
        assert record["engine_step_us"] >= modelled_us - 0.01
        schedule_us = cost["delta_us"] + record["build_meta_us"]
        assert record["step_duration_us"] == pytest.approx(schedule_us, abs=0.01)


def test_step_starts_at_the_deadline_of_the_step_before(taxed: Launched) -> None:
    steps = taxed.records("step.scheduler.jsonl")[:10]
    writes = [w for w in taxed.records("truth.jsonl")[1]["writes"] if w[1]]
    assert [s["t_ns"] for s in steps[1:]] == [w[2] for w in writes[:-1]]


def test_truth_log_has_a_line_for_each_request(taxed: Launched) -> None:
    requests = taxed.records("truth.jsonl")[1:]
    assert len(requests) == 3
    for request in requests:
        tokens = [w for w in request["writes"] if w[1]]
        assert [w[1] for w in tokens] == [1] * 10
        assert request["outcome"] == "ok"
        assert request["t_arrival_ns"] <= request["t_headers_ns"] <= tokens[0][0]
        assert all(w[0] >= w[2] for w in tokens)
        stamps = [w[0] for w in request["writes"]]
        assert stamps == sorted(stamps)


def test_plain_has_no_callbacks(tmp_path: Path) -> None:
    server = run_three(tmp_path, "plain", {})
    for process in ("scheduler", "worker"):
        for record in server.records(f"step.{process}.jsonl"):
            names = ("build_meta_us", "get_finished_us", "start_load_kv_us")
            assert [record[name] for name in names] == [None, None, None]
    assert server.records("truth.jsonl")[0]["tax"] is None


def test_the_request_id_of_the_client_is_kept(server: Launched) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    _, answer = server.request("POST", "/v1/completions", body, {"X-Request-Id": "mine-17"})
    assert json.loads(answer)["id"] == "cmpl-mine-17"


def test_the_step_log_is_written_while_the_server_runs(server: Launched) -> None:
    server.stream()
    path = server.folder / "step.scheduler.jsonl"
    with path.open("rb") as stream:
        while not stream.read():
            os.sched_yield()


def test_no_step_log_without_its_environment_variable(tmp_path: Path) -> None:
    with launched(tmp_path, step_log=False) as server:
        server.stream()
        server.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"embedded.json", "truth.jsonl"}


def test_every_configuration_of_the_study_is_defined() -> None:
    ids = filled(load_yaml(ROOT / "config" / "config.yaml"), "config")["configurations"]
    connectors = load_yaml(ROOT / "config" / "embedded.yaml")["connectors"]
    assert list(connectors) == ids
    assert connectors["plain"] is None
    assert "illustrative" in load_yaml(ROOT / "config" / "embedded.yaml")["label"]


def test_connector_reduces_kv_blocks_by_its_share(tmp_path: Path) -> None:
    path = tmp_path / "embedded.json"
    path.write_text(json.dumps(config_with({"scheduler": {"kv_blocks": 2000}})))
    assert load_config(path, "plain").scheduler.kv_blocks == 2000
    assert load_config(path, "mooncake_both").scheduler.kv_blocks == 1800
    path.write_text(json.dumps(config_with({"scheduler": {"kv_blocks": 520}})))
    assert load_config(path, "plain").scheduler.kv_blocks == 520
    with pytest.raises(ConfigError, match="kv_blocks: found 468; allowed: at least 512"):
        load_config(path, "mooncake_both")


def test_jitter_and_launch_offset_have_the_configured_spread() -> None:
    cost = StepCost(100, 200, 1, 1, 0, 0.1, 0.05)
    factors = np.log([StepClock(cost, seed).launch_factor for seed in range(4000)])
    assert factors.std() == pytest.approx(0.05, rel=0.1)
    clock = StepClock(cost, 5)
    steps = np.array([sum(clock.draw_us(10, 2, 0)) for _ in range(20_000)])
    assert np.log(steps).std() == pytest.approx(0.1, rel=0.05)
    assert np.median(steps) == pytest.approx(312 * clock.launch_factor, rel=0.01)
