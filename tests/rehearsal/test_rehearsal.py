"""Test rehearsals: the machine's cost, overloaded cells, and the page."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from snakemake.utils import update_config

from connector_tax.analysis.measure import measure_requests
from connector_tax.analysis.resources import read_launch_records
from connector_tax.artifacts.folder import StudyFolder
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, ConfigError, load_yaml
from connector_tax.engine.connectors import taxes_of_step
from connector_tax.engine.scheduler import StepPlan
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.files import read_json, write_json
from connector_tax.loadgen.plan import CellRule
from connector_tax.provenance.claims import FAIL, Ledger
from connector_tax.provenance.records import CHECKS, Records, check_cell
from connector_tax.rehearsal import __main__ as command
from connector_tax.rehearsal.findings import COLUMNS, Section, page
from connector_tax.rehearsal.launch import VirtualCell, rehearse_launch, virtual_engine
from connector_tax.rehearsal.machine import Machine, machine_of
from connector_tax.roofline import Roofline, read_accelerator, read_model
from connector_tax.study.design import resolve
from connector_tax.vllm.device_time.roofline import device_us
from tests.provenance.audited_study import give_prompts
from tests.shared import known
from tests.study_folder import edited_json, seal_cell, write_stages
from tests.workflow.harness import TINY, smaller

QWEN = ROOT / "config/models/Qwen3-Coder-30B-A3B-Instruct.json"


def test_rehearsal_uses_the_step_times_of_an_emulated_device() -> None:
    study, real = (
        resolve(load_yaml(ROOT / f"config/{n}.yaml"), n) for n in ("h20-emulated", "h20")
    )
    machine, plan = machine_of(study), StepPlan(decode_seqs=16, kv_tokens=67_200)
    coefficients = study["config"]["engine"]["device_time_content"]
    assert machine.device_us is not None
    assert machine.device_us(plan) == pytest.approx(device_us(coefficients, plan))
    # No weights are read, nothing is compiled.
    assert machine.startup_s < machine_of(real).startup_s


def test_emulated_device_steps_vary_only_by_configured_jitter() -> None:
    study = resolve(load_yaml(ROOT / "config/h20-emulated.yaml"), "h20-emulated")
    cost = machine_of(study).engines["plain"].step_cost
    spread = study["config"]["rehearsal"].pop("launch_sd")
    assert (cost.jitter_rel_sd, cost.launch_offset_rel_sd) == (0.0, spread)
    cost = machine_of(study).engines["plain"].step_cost
    assert (cost.jitter_rel_sd, cost.launch_offset_rel_sd) == (0.0, 0.0)
    study["config"]["rehearsal"]["launch_sd"] = 0.004
    machine = machine_of(study)
    assert machine.engines["plain"].step_cost.launch_offset_rel_sd == 0.004
    assert machine.launch_sd == 0.004
    real = machine_of(resolve(load_yaml(ROOT / "config/h20.yaml"), "h20"))
    cost = real.engines["plain"].step_cost
    assert min(cost.jitter_rel_sd, cost.launch_offset_rel_sd) > 0


@pytest.fixture
def at_the_peak() -> Roofline:
    """Return an H20 that reaches all of its peaks."""
    accelerator, efficiency = read_accelerator("H20")
    efficiency |= {"linear": 1.0, "attention": 1.0, "bandwidth": 1.0}
    efficiency |= {"besides_us": 0.0, "reserve_gib": 0.0}
    return Roofline(read_model(QWEN), accelerator, efficiency, 1)


def test_model_size_follows_from_its_config(at_the_peak: Roofline) -> None:
    model = at_the_peak.model
    assert model.parameters / 1e9 == pytest.approx(30.5, abs=0.1)
    assert model.active_parameters / 1e9 == pytest.approx(3.05, abs=0.05)
    assert model.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2
    memory = 97871 * 2**20 * 0.9
    assert at_the_peak.kv_tokens({}) == (memory - 2 * model.parameters) // 98304


def test_a_step_takes_the_slower_of_arithmetic_and_memory(at_the_peak: Roofline) -> None:
    n = 32768
    # 0.18 PFLOP in matrix products (the output's only once) and 0.42 in causal attention.
    flops = 2 * (3.05e9 - 0.31e9) * n + 4 * 48 * 32 * 128 * n * n / 2
    prefill = StepPlan(prefill_tokens=n, prefill_pairs=n * (n + 1) // 2)
    assert at_the_peak.device_us(prefill) / 1e6 == pytest.approx(flops / 148e12, rel=0.01)
    # One sequence: eight experts of each layer and the output's weights, then its KV cache.
    decode = StepPlan(decode_seqs=1, kv_tokens=100_000)
    read = 2 * at_the_peak.model.active_parameters + 100_000 * 98304
    assert at_the_peak.device_us(decode) / 1e6 == pytest.approx(read / 4e12, rel=0.01)
    # Many sequences touch every expert.
    crowd = StepPlan(decode_seqs=256)
    assert at_the_peak.device_us(crowd) / 1e6 == pytest.approx(61e9 / 4e12, rel=0.03)
    two = replace(at_the_peak, gpus=2)
    assert two.device_us(prefill) == pytest.approx(at_the_peak.device_us(prefill) / 2)


def test_fp8_model_is_refused_for_an_accelerator_without_fp8(tmp_path: Path) -> None:
    content = read_json(QWEN) | {"quantization_config": {"quant_method": "fp8"}}
    write_json(tmp_path / "config.json", content)
    accelerator, efficiency = read_accelerator("A100")
    with pytest.raises(ConfigError, match="found one without fp8"):
        Roofline(read_model(tmp_path / "config.json"), accelerator, efficiency, 1)


def test_configured_cache_size_replaces_the_share_of_memory() -> None:
    machine = machine_of(resolve(load_yaml(ROOT / "config/gpu-short.yaml"), "gpu-short.yaml"))
    # 4 GiB, of 112 KiB a token.
    assert machine.engines["plain"].scheduler.kv_blocks == 2**32 // (28 * 2 * 8 * 128 * 2) // 16


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("gpu-short",), marks=pytest.mark.workflow),
        pytest.param(("gpu-short", "gpu-short-8b"), marks=pytest.mark.workflow),
        *(
            pytest.param(("h20", *overlay), marks=[pytest.mark.long, pytest.mark.timeout(1800)])
            for overlay in ((), ("h20-verdicts",), ("gpu-small",), ("h100",))
        ),
    ],
)
def test_rehearsal_of_every_shipped_gpu_study_exits_with_0(
    tmp_path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config: dict[str, Any] = {}
    for name in names:
        update_config(config, load_yaml(ROOT / f"config/{name}.yaml"))
    write_json(tmp_path / "study.json", resolve(config, names[-1]))
    assert command.main(["--study", str(tmp_path / "study.json")]) == 0


@pytest.mark.parametrize(
    ("section", "flags", "message"),
    [
        (None, {}, "rehearsal: missing"),
        ({"accelerator": "H21"}, {}, "rehearsal.accelerator: found 'H21'; allowed: H20, "),
        ({"model_config": "no.json"}, {}, "rehearsal.model_config: no.json: no such file"),
        ({"accelerator": "L4"}, {}, "engine.flags.--max-model-len: found 200000; allowed: at most"),
    ],
)
def test_error_of_an_invalid_rehearsal_machine_names_the_key(
    section: dict[str, str] | None, flags: dict[str, Any], message: str
) -> None:
    config = load_yaml(ROOT / "config/h20.yaml")
    config["engine"]["flags"] |= flags
    config["rehearsal"] = {**config["rehearsal"], "model_config": str(QWEN), **(section or {})}
    if section is None:
        del config["rehearsal"]
    study = resolve(config, "h20.yaml")
    with pytest.raises(ConfigError) as error:
        machine_of(study)
    assert message in str(error.value)


def tiny() -> StudyDocument:
    return resolve(yaml.safe_load(smaller(TINY.read_text())), "tiny.yaml")


def virtual(rule: CellRule, rate_rps: float) -> tuple[VirtualCell, VirtualEngine]:
    study = tiny()
    machine = machine_of(study)
    offsets = (np.arange(0, rule.schedule_s, 1 / rate_rps) * 1e9).astype(np.int64)
    engine = VirtualEngine(machine.engines["plain"], 1)
    return VirtualCell(offsets, rule, (4096, 8), 500_000_000), engine


def test_overloaded_cell_of_a_rehearsal_fails_requests_and_ends() -> None:
    # A prefill takes 0.1 s, and twenty requests/s arrive.
    rule = CellRule(0.1, 2.0, 1000, 4.0, 0.5, 16, 0.6)
    cell, engine = virtual(rule, 20)
    cell.serve(engine)
    kinds = [entry.error_kind for entry in cell.plan.requests()]
    assert kinds.count("request_timeout") > 5
    assert kinds.count("drain_timeout") + kinds.count("inflight_cap") > 0
    assert cell.plan.outstanding == 0
    assert cell.plan.cooldown_ended_by in ("drain", "schedule")
    assert engine.now_ns / 1e9 < 0.1 + 4.0 + 0.5 + 1.0
    assert not engine.scheduler.has_work


def test_rehearsed_launch_is_readable_like_a_measured_one(tmp_path: Path) -> None:
    study = tiny()
    study_file = write_stages(tmp_path / "x", study)
    launch, machine = Launch("noop_connector", 0, "A"), machine_of(study)
    rehearse_launch(study, launch, study_file.parent, machine)
    folder = StudyFolder.load(study_file)
    cells = [c for c in folder.cells("A") if c.key.config == launch.config]
    assert [cell.status for cell in cells] == ["valid", "valid"]
    engine = machine.engines[launch.config]
    assert engine.tax is not None
    first_step_us = engine.step_cost.delta_us + engine.step_cost.device_us(64, 0, 0)
    first_step_us += sum(taxes_of_step(engine.tax, 0, 1))
    requests = measure_requests(cells[0])
    assert float(np.median(requests.ttft_ms)) == pytest.approx(first_step_us / 1e3, rel=0.1)
    record = known(cells[0].record)
    assert record["rehearsed"]["seconds"] > 0.6
    assert 0 < record["rehearsed"]["load"] < 1
    (records,) = [r for r in read_launch_records(folder) if r.configuration == launch.config]
    assert known(records.resources)["idle_cpu"]["value"] == engine.tax.background_cpu
    assert known(records.settings)["kv_blocks"]["value"] == engine.scheduler.kv_blocks


def test_rehearsed_cells_pass_the_audit_of_their_records(tmp_path: Path) -> None:
    study = tiny()
    study_file = write_stages(tmp_path / "x", study)
    launch, machine = Launch("noop_connector", 0, "A"), machine_of(study)
    rehearse_launch(study, launch, tmp_path / "x", machine)
    for record_file in launch.folder(tmp_path / "x").glob("*/cell_*.json"):
        with edited_json(record_file) as record:
            give_prompts(study, record, next(record_file.parent.glob("requests_*")))
        seal_cell(record_file.parent)
    folder, ledger = StudyFolder.load(study_file), Ledger()
    cells = [cell for cell in folder.cells("A") if cell.record is not None]
    for cell in cells:
        check_cell(Records(folder.study, cell), ledger)
    assert [claim for claim in ledger.claims if claim.verdict == FAIL] == []
    assert len(ledger.claims) == len(cells) * len(CHECKS) > 0
    steps = cells[0].lines("engine_step")
    tax = known(machine.engines[launch.config].tax)
    for name in ("get_finished_us", "start_load_kv_us"):
        assert {step[name] for step in steps} == {getattr(tax, name), None}


def test_page_wraps_to_eighty_columns_without_losing_text() -> None:
    row = ["r0.5", "0.5", "410.2", "100%", "256", "123456", "1234", "12.5", "1000", "saturated"]
    long = "a sentence that is too long for a line " * 4
    headings = ["cell", "req/s", "min", "load", "in fl.", "TTFT", "TPOT", "+-%", "drop", "state"]
    text = page("x", [Section("Phase A", [long], headings, [row])])
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert long.strip() in " ".join(text.split())
    assert row in [line.split() for line in text.splitlines()]


def launch_times(machine: Machine, study: StudyDocument) -> list[float]:
    """Return the time of a step without jitter in each launch of Phase A."""
    times = []
    for launch in launches(study, "A"):
        engine = virtual_engine(study, launch, machine)
        engine.add(0, 64, 1)
        engine.step()
        times.append(float(engine.now_ns))
    return times


def test_launches_differ_by_the_machines_spread() -> None:
    config = yaml.safe_load(smaller(TINY.read_text()))
    study = resolve({**config, "blocks": 200}, "tiny.yaml")
    machine = machine_of(study)
    machine = replace(machine, engines=dict.fromkeys(machine.engines, machine.engines["plain"]))
    jitter = machine.engines["plain"].step_cost.jitter_rel_sd
    quiet = np.log(launch_times(machine.noisy(0.0), study))
    assert quiet.std() == pytest.approx(jitter, rel=0.1)
    spread = np.log(launch_times(machine.noisy(0.1), study))
    assert spread.std() == pytest.approx(math.hypot(0.1, jitter), rel=0.1)


@pytest.mark.long
def test_command_rehearses_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_file = write_stages(tmp_path / "x", tiny())
    assert command.main(["--study", str(study_file)]) == 0
    output = capsys.readouterr().out
    assert "Duration" in output
    assert "blocks: 1 decides nothing" in output
    few = "cell.min_completed: 24 requests at r40 give no verdict on ttft_p90, tpot_p90, e2e_p90."
    assert few in " ".join(output.split())
    kept = (study_file.parent / "rehearsal.md").read_text()
    assert kept.startswith("# Rehearsal of tiny")
    assert kept in output


@pytest.mark.long
def test_rehearsal_with_cells_that_cannot_be_valid_exits_non_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(smaller(TINY.read_text()))
    config["cell"]["request_timeout_s"] = 0.001
    study_file = write_stages(tmp_path / "x", resolve(config, "tiny.yaml"))
    assert command.main(["--study", str(study_file)]) == 1
    output = capsys.readouterr().out
    assert "phase_a.rates_rps: r20 cannot be valid" in output
    assert "phase_b: 32x8 cannot be valid" in output


def test_ended_rehearsal_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    study_file = write_stages(
        tmp_path / "x", resolve(load_yaml(ROOT / "config" / "config.yaml"), "config.yaml")
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    command = [sys.executable, "-m", "connector_tax.rehearsal", "--study", str(study_file)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}) as rehearsal:
        process = psutil.Process(rehearsal.pid)

        def launches() -> list[psutil.Process]:
            children = process.children()
            return [c for c in children if "connector_tax.rehearsal.launch" in c.cmdline()]

        deadline = time.monotonic() + 60
        while not launches() and rehearsal.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert launches() != []
        children = process.children()
        rehearsal.terminate()
        assert rehearsal.wait(20) == -signal.SIGTERM
    psutil.wait_procs(children, 20)
    assert [c for c in children if c.is_running()] == []
    assert list(folder.iterdir()) == []
