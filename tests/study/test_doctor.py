"""Test the doctor's findings, and that a block ends on an unfit machine."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from connector_tax.ab import __main__ as ab
from connector_tax.artifacts import paths
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.config import ROOT, filled, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.rehearsal import doctor as doctor_command
from connector_tax.study import doctor, launch, preflight
from connector_tax.study.design import resolve
from connector_tax.study.device import hold_devices
from connector_tax.study.doctor import UnfitError, _other_sources, rdma, require_fit, triton
from connector_tax.study.guard import PARENT_VARIABLE, process_name
from connector_tax.vllm.overlay import engine_files, sources_sha256
from tests.shared import interpreter
from tests.study.conftest import StandIn
from tests.study.driving import arguments, launch_folder
from tests.study_folder import write_stages
from tests.workflow.harness import wait_for

Findings = Callable[..., tuple[int, dict[str, tuple[str, str]]]]


@pytest.fixture
def findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Findings:
    """Run the doctor on a shipped study with another engine or server; return its status and
    rows."""

    def ask(
        name: str, engine: Mapping[str, Any] | None = None, **server: Any
    ) -> tuple[int, dict[str, tuple[str, str]]]:
        config = filled(load_yaml(ROOT / f"config/{name}.yaml"), "config")
        config["server"] |= {"device": "doctor_tests", **server}
        config["engine"] |= engine or {}
        write_json(tmp_path / "study.json", resolve(config, name))
        status = doctor_command.main(["--study", str(tmp_path / "study.json"), "--json"])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return status, {row["check"]: (row["verdict"], row["text"]) for row in rows}

    return ask


def test_the_default_study_needs_neither_vllm_nor_a_gpu(findings: Findings, tmp_path: Path) -> None:
    status, rows = findings("config")
    assert status == 0
    assert rows["device"] == ("ok", "doctor_tests is free")
    assert {"vLLM", "GPU", "model"}.isdisjoint(rows)
    # Its emulated LMCache takes no buffer.
    assert "LMCache" not in rows["memory"][1]
    assert [p.name for p in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.parametrize(("study", "most"), [("config", 64), ("vllm-cpu", 41)])
def test_tmpdir_too_long_for_a_socket_is_a_failure(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, study: str, most: int
) -> None:
    uid = len(str(os.getuid())) - 1 if study == "vllm-cpu" else 0
    for length, verdict in ((most - uid, "ok"), (most - uid + 1, "fail")):
        monkeypatch.setattr("tempfile.tempdir", "/" + "x" * (length - 1))
        _, rows = findings(study)
        assert rows["TMPDIR"][0] == verdict, rows["TMPDIR"]
    assert "108 bytes; allowed: 107; set TMPDIR to a folder with a shorter" in rows["TMPDIR"][1]


def test_tmpdir_too_long_for_a_socket_ends_gates_and_ab_before_a_server(
    study_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 90)
    monkeypatch.chdir(tmp_path)
    (study_file.parent / "preflight" / "preflight_status.json").unlink()
    assert preflight.main(["--study", str(study_file)]) == 2
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    serve = ["--baseline", "true {port}", "--candidate", "true -x {port}"]
    assert ab.main([*serve, "--rate", "1", "--shape", "8x8"]) == ab.NO_NUMBER
    messages = [line for line in capsys.readouterr().err.splitlines() if "TMPDIR" in line]
    assert len(messages) == 2
    remedy = "allowed: 107; set TMPDIR to a folder with a shorter path"
    assert all(remedy in message for message in messages)
    assert not list(tmp_path.rglob("launch.sh"))


@pytest.mark.parametrize(("steal", "verdict"), [(1.0, "ok"), (100.0, "warn")])
def test_doctor_reports_stolen_cpu_time(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, steal: float, verdict: str
) -> None:
    times = psutil.cpu_times()._replace(
        user=900.0, nice=0.0, system=0.0, idle=5000.0, iowait=50.0, irq=0.0, softirq=0.0,
        steal=steal, guest=0.0, guest_nice=0.0,
    )  # fmt: skip
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    row = findings("config")[1]["steal"]
    share = f"{steal / (900 + steal):.1%}"
    expected = f"the host took {share} of the requested CPU time since the machine started"
    assert row == (verdict, expected)


@pytest.mark.skipif(
    (ROOT / "envs/vllm-gpu/.venv").exists(), reason="this machine has the GPU environment"
)
def test_a_machine_without_gpu_and_environment_fails(findings: Findings) -> None:
    status, rows = findings("h20")
    assert status == 1
    assert rows["GPU"][0] == "fail"
    assert rows["model"][0] == "warn"


def test_unbuilt_environment_names_its_command_and_fails_once_the_study_has_begun(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ROOT", tmp_path / "a fresh checkout")
    monkeypatch.setattr(doctor, "check_python", lambda *_: None)
    python = "envs/vllm-cpu/.venv/bin/python"
    for name in ("vllm-cpu", "h20-emulated"):
        status, rows = findings(name)
        assert status == 0, rows
        command = "python -m connector_tax.vllm.environment vllm-cpu"
        assert rows["environment"] == (
            "warn",
            f"not built yet; the run builds it. To build it now: {command}",
        )
        assert {"vLLM", "emulated device"}.isdisjoint(rows)
    _, rows = findings("vllm-cpu", engine={"python": "elsewhere/python"})
    assert rows["vLLM"] == ("fail", "elsewhere/python: no such file; engine.python names it")
    write_json(tmp_path / "preflight" / "preflight_status.json", {})
    _, rows = findings("vllm-cpu")
    assert rows["environment"][0] == "fail"
    assert rows["vLLM"] == ("fail", f"{python}: no such file; engine.python names it")


@pytest.mark.parametrize("name", ["h20-emulated", "vllm-cpu"])
def test_doctor_accepts_a_missing_model_that_the_run_builds(
    findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(doctor, "ROOT", tmp_path / "a fresh checkout")
    verdict, text = findings(name)[1]["model"]
    assert (verdict, text.partition(": ")[2]) == ("ok", "missing; the run makes it")
    # Once gates have run, the model must exist.
    write_json(tmp_path / "preflight" / "preflight_status.json", {})
    assert findings(name)[1]["model"][0] == "fail"


def test_doctor_fails_for_a_missing_model_folder(findings: Findings) -> None:
    _, rows = findings("vllm-cpu", engine={"model": "./elsewhere/model"})
    assert rows["model"] == ("fail", "./elsewhere/model: missing")


def test_doctor_fails_for_a_missing_folder_of_modules(findings: Findings, tmp_path: Path) -> None:
    there = ["scripts", str(tmp_path)]
    assert "modules" not in findings("vllm-cpu", engine={"pythonpath": there})[1]
    for missing in ("./no_modules", str(tmp_path / "none")):
        status, rows = findings("vllm-cpu", engine={"pythonpath": [*there, missing]})
        assert status == 1
        text = f"{missing}: no such folder; engine.pythonpath names it"
        assert rows["modules"] == ("fail", text)


@pytest.mark.parametrize(
    ("driver", "used", "busy", "persistence", "verdicts"),
    [
        ("580.65.06", 512, 0, "Enabled", ("ok", "ok", "ok", "ok")),
        ("570.86.15", 30000, 0, "Enabled", ("fail", "fail", "ok", "ok")),
        ("580.65.06", 512, 37, "Disabled", ("ok", "ok", "fail", "warn")),
    ],
)
def test_doctor_checks_the_gpu_of_the_study(
    findings: Findings,
    monkeypatch: pytest.MonkeyPatch,
    stand_in: StandIn,
    driver: str,
    used: int,
    busy: int,
    persistence: str,
    verdicts: tuple[str, str, str, str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    row = f"NVIDIA H20, {driver}, 97871, {used}, {busy}, 1980, {persistence}"
    stand_in("nvidia-smi", f"echo '{row}'")
    _, rows = findings("h20")
    assert rows["GPU"] == ("ok", f"0: NVIDIA H20, driver {driver}")
    assert rows["GPU driver"][1] == f"{driver}; CUDA 13 of vllm-gpu needs 580 or later"
    assert rows["GPU memory"][1] == f"{97871 - used} of 97871 MiB free, 90% needed"
    checks = ("GPU driver", "GPU memory", "GPU load", "GPU clocks")
    assert tuple(rows[check][0] for check in checks) == verdicts


def test_gpu_memory_counts_the_configured_cache(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stand_in("nvidia-smi", "echo 'NVIDIA H20, 580.65.06, 97871, 0, 0, 1980, Enabled'")
    flags = load_yaml(ROOT / "config/h20.yaml")["engine"]["flags"]
    for gib, verdict in ((20, "ok"), (40, "fail")):
        cache = {"--kv-cache-memory-bytes": gib * 2**30}
        rows = findings("h20", engine={"flags": flags | cache})[1]
        assert rows["GPU memory"][0] == verdict
    assert "weights and KV cache take" in rows["GPU memory"][1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vllm-cpu", "Mooncake listens on every address, whatever its configuration"),
        ("h20", "NIXL listens on the machine's address, unless UCX_NET_DEVICES is lo"),
    ],
)
def test_doctor_warns_of_ports_reachable_from_the_network(
    findings: Findings, name: str, sentence: str
) -> None:
    _, rows = findings(name)
    verdict, text = rows["listening"]
    assert verdict == "warn"
    assert sentence in text
    assert ("NIXL" in text) == (name == "h20")


@pytest.mark.parametrize("status", [0, 6])
def test_gpu_is_named_by_index_or_uuid_like_nvidia_smi(
    findings: Findings, stand_in: StandIn, status: int
) -> None:
    stand_in("nvidia-smi", f'echo "$1, 570, [N/A], 1, 0, 1980, Enabled"; exit {status}')
    visible = {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-5ca1ab1e,1"}}
    _, rows = findings("h20", engine=visible)
    if status:
        assert rows["GPU"][0] == "fail"
        assert rows["GPU"][1].startswith("GPU-5ca1ab1e: nvidia-smi: --id=GPU-5ca1ab1e")
    else:
        assert rows["GPU"] == ("ok", "GPU-5ca1ab1e: --id=GPU-5ca1ab1e, driver 570")
        assert rows["GPU memory"][0] == "fail"
        assert "[N/A]" in rows["GPU memory"][1]


@pytest.mark.parametrize(
    ("governors", "wanted"),
    [
        ([], ("ok", "this system does not control the clock")),
        (["performance"] * 2, ("ok", "performance on 2 CPUs")),
        (
            ["performance", "powersave", "powersave"],
            ("warn", "performance on 1 CPUs, powersave on 2 CPUs"),
        ),
    ],
)
def test_doctor_reads_the_clock_governor_of_every_cpu(
    tmp_path: Path, governors: list[str], wanted: tuple[str, str]
) -> None:
    for number, name in enumerate(governors):
        path = tmp_path / f"cpu{number}" / "cpufreq" / "scaling_governor"
        path.parent.mkdir(parents=True)
        path.write_text(f"{name}\n")
    finding = doctor.governor(tmp_path)
    assert (finding.verdict, finding.text) == wanted


def test_doctor_names_the_process_that_holds_the_device(findings: Findings) -> None:
    with hold_devices(["doctor_tests_busy"]):
        status, rows = findings("config", device="doctor_tests_busy")
    assert status == 1
    assert rows["device"][0] == "fail"
    assert f"pid {os.getpid()}, user " in rows["device"][1]


def test_estimated_disk_space_grows_with_the_blocks(tmp_path: Path) -> None:
    config = load_yaml(ROOT / "config/h20.yaml")
    one = resolve(config, "h20")
    three = resolve({**config, "blocks": 3}, "h20")
    sizes = [doctor.artifact_bytes(study, tmp_path) for study in (one, three)]
    assert sizes[1] == pytest.approx(3 * sizes[0])


def test_doctor_checks_the_gpu_of_every_rank(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    busy = 'case "$1" in --id=1) busy=90;; *) busy=0;; esac'
    stand_in("nvidia-smi", f'{busy}; echo "$1, 580, 97871, 1, $busy, 1980, Enabled"')
    two = {"flags": {"--tensor-parallel-size": 2}}
    _, rows = findings("h20", engine=two)
    assert rows["GPU load"] == ("fail", "90% busy; a study needs it idle")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, rows = findings("h20", engine=two | {"environment": {}})
    assert rows["GPU load"][0] == "ok"
    assert rows["GPU"] == ("ok", "3: --id=3, driver 580")
    assert rows["GPUs"] == ("fail", "CUDA_VISIBLE_DEVICES: found 3; allowed: 2, one for each rank")


# Qwen3-Coder-30B-A3B has 30.5 billion weights of two bytes: 56.9 GiB.
@pytest.mark.parametrize(
    ("available_gib", "verdict", "text"),
    [
        (120, "ok", "21.1 needed (server 16.0, LMCache 5.0, bodies 0.1)"),
        (60, "warn", "no room to keep 56.9 GiB of weights: each launch reads them from disk"),
        (20, "fail", "20.0 of 256.0 GiB available, 21.1 needed"),
    ],
)
def test_doctor_compares_memory_with_weights_lmcache_and_request_bodies(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, available_gib: int, verdict: str, text: str
) -> None:
    memory = SimpleNamespace(available=available_gib * 2**30, total=256 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    _, rows = findings("h20")
    assert rows["memory"][0] == verdict
    assert text in rows["memory"][1]


def test_required_memory_includes_a_buffer_per_lmcache_rank_and_weights_on_a_cpu(
    findings: Findings,
) -> None:
    engine = load_yaml(ROOT / "config/h20.yaml")["engine"]
    two = {"flags": engine["flags"] | {"--tensor-parallel-size": 2}}
    _, rows = findings("h20", engine={**two, "environment": {}, "device": "cpu"})
    assert "(server 4.0, LMCache 10.0, weights 56.9, bodies 0.1)" in rows["memory"][1]


# ---- a block's machine


def test_block_on_an_unfit_machine_ends_before_its_first_launch(tmp_path: Path) -> None:
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    config["engine"]["python"] = "envs/nowhere/bin/python"
    study_file = write_stages(tmp_path, resolve(config, "vllm-cpu"))
    done = subprocess.run(
        [sys.executable, "-m", "connector_tax.study.block", "--study", study_file, "--block", "0",
         "--phase", "A", "--logs", tmp_path / "logs"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot measure vllm-cpu:\n  vLLM: envs/nowhere/bin/python: no such file" in done.stderr
    assert not (tmp_path / paths.RUNS).exists()


def test_block_ends_with_snakemake_while_its_machine_is_checked(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    config["engine"]["python"] = str(interpreter(tmp_path, f"echo $$ >{begun}; exec sleep 60"))
    study_file = write_stages(tmp_path / "study", resolve(config, "vllm-cpu"))
    snakemake = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    block = subprocess.Popen(
        [sys.executable, "-m", "connector_tax.study.block", "--study", study_file, "--block", "0",
         "--phase", "A", "--logs", tmp_path / "logs"],
        env={**os.environ, PARENT_VARIABLE: process_name(snakemake.pid)},
    )  # fmt: skip
    wait_for(lambda: begun.exists() and begun.read_text().endswith("\n"), block)
    check = os.pidfd_open(int(begun.read_text()))
    snakemake.kill()
    snakemake.communicate()
    assert block.wait(timeout=20) == 1
    assert select.select([check], [], [], 20)[0]
    os.close(check)


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="has an RDMA device")
@pytest.mark.parametrize("skipped", [False, True])
def test_configuration_skipped_by_its_gate_needs_no_rdma(tmp_path: Path, skipped: bool) -> None:
    study = resolve(load_yaml(ROOT / "config/h20.yaml"), "h20.yaml")
    study["config"]["engine"]["forms"] = {}
    mooncake = [e["id"] for e in study["configurations"] if e["connector"] == "MooncakeConnector"]
    write_stages(tmp_path, study, dict.fromkeys(mooncake, "its gate") if skipped else None)
    with pytest.raises(UnfitError) as refused:
        require_fit(study, tmp_path)
    assert ("\n  RDMA: no device" in str(refused.value)) is not skipped
    assert "\n  environment:" not in str(refused.value)


def interpreter_of(package: Path) -> Path:
    """Return an interpreter that finds a vLLM in `package` but cannot import it."""
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('to be found, not imported')\n")
    script = f'PYTHONPATH={package.parent} exec {sys.executable} "$@"'
    return interpreter(package.parents[1], script)


def test_doctor_reports_vllm_sources_changed_since_step_timing_was_proved(tmp_path: Path) -> None:
    package = tmp_path / "site" / "vllm"
    python = interpreter_of(package)
    status = tmp_path / "status.json"
    engine: EngineSection = {"kind": "vllm", "label": "a vLLM", "python": str(python), "forms": {}}
    write_json(status, {"step_timing_available": False})
    files = engine_files(engine)
    assert list(_other_sources(engine, files, status)) == []
    proved = sources_sha256(package)
    assert files == {str(python): {"lock_sha256": None, "sources_sha256": proved}}
    write_json(status, {"step_timing_available": True, "vllm_sources_sha256_before": proved})
    assert list(_other_sources(engine, files, status)) == []
    (package / "loop.py").write_text("\n")
    (told,) = _other_sources(engine, engine_files(engine), status)
    assert f"{proved[:12]} where step timing was proved" in told
    package.rename(tmp_path / "gone")
    (told,) = _other_sources(engine, engine_files(engine), status)
    assert f"{python}: no vLLM" in told


@pytest.mark.parametrize("given", [True, False])
def test_launch_uses_engine_files_from_its_block_or_reads_them(
    tmp_path: Path, given: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site" / "vllm"
    config = filled(load_yaml(ROOT / "config/vllm-cpu.yaml"), "config")
    config["engine"]["python"] = python = str(interpreter_of(package))
    config["server"]["device"] = f"t{tmp_path.name}"
    study_file = write_stages(tmp_path / "x", resolve(config, "vllm-cpu"), step_timing=False)
    told = {python: {"lock_sha256": "a10c", "sources_sha256": "50ce"}}
    # Passed like this by the block's driver.
    options = ["--engine-files", json.dumps(told)] if given else []
    launch.main([*arguments(study_file), *options])
    assert "plain/block0/A failed" in "".join(capsys.readouterr())
    (attempt,) = read_json(launch_folder(study_file) / paths.ATTEMPTS)
    here = {python: {"lock_sha256": None, "sources_sha256": sources_sha256(package)}}
    assert attempt["node"]["engine_files"] == (told if given else here)


def test_each_environment_of_a_study_has_its_lock(tmp_path: Path) -> None:
    pythons = []
    for name in ("one", "other"):
        python = tmp_path / name / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        write_json(python.parents[1] / "built.json", {"lock_sha256": name})
        pythons.append(str(python))
    engine: EngineSection = {
        "kind": "vllm",
        "label": "two vLLMs",
        "python": pythons[0],
        "forms": {"old": {"python": pythons[1]}, "further": {"python": pythons[1]}},
    }
    assert {python: files["lock_sha256"] for python, files in engine_files(engine).items()} == {
        pythons[0]: "one",
        pythons[1]: "other",
    }


def test_triton_needs_a_compiler_and_the_interpreters_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = interpreter(tmp_path, f"echo {tmp_path}")
    one: Any = {"python": str(bare), "forms": {}}
    two: Any = {"python": str(bare), "forms": {"nixl_both": {"python": str(tmp_path / "none")}}}
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert re.match("no C compiler .*; no Python.h for .*: Triton cannot build", triton(one).text)
    monkeypatch.undo()
    (tmp_path / "cc").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert re.match(f"no Python.h for {bare} .*; .* does not run", triton(two).text)
    (tmp_path / "Python.h").touch()
    assert triton(one).verdict == "ok"


def test_doctor_requires_rdma_only_for_configurations_that_use_it(tmp_path: Path) -> None:
    study = resolve(load_yaml(ROOT / "config/h20.yaml"), "h20.yaml")
    assert rdma(study, tmp_path).verdict == "ok"
    del study["config"]["engine"]["forms"]["mooncake_consumer"]
    assert rdma(study, tmp_path).text.endswith("mooncake_protocol: tcp for [mooncake_consumer]")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert rdma(study, tmp_path).verdict == "ok"
