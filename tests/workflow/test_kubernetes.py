"""The Job of workflow/kubernetes: its fields agree, and its command measures a study."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json
from connector_tax.study.block import end_s
from tests.workflow.harness import environment, prepare, run
from tests.workflow.small import smaller

CPUS = sorted(os.sched_getaffinity(0))[:2]
JOB: dict[str, Any] = load_yaml(ROOT / "workflow" / "kubernetes" / "job.yaml")
POD: dict[str, Any] = JOB["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
ENV = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}


def test_the_jobs_fields_are_those_of_its_study() -> None:
    config: Any = {}
    for name in ENV["CONFIG"].split():
        config |= load_yaml(ROOT / name)
    assert ENV["STUDY"] == config["study"] == JOB["metadata"]["name"]
    assert ENV["BLOCKS"] == str(config["blocks"])
    last = "preflight/shape_rates.json" if config.get("shape_rates") else "reference_rates.json"
    assert ENV["RATES"] == f"results/{config['study']}/{last}"
    assert POD["terminationGracePeriodSeconds"] >= end_s(config)


def test_a_pod_for_each_device_all_at_once_each_with_its_cpus_alone() -> None:
    spec = JOB["spec"]
    assert (JOB["apiVersion"], JOB["kind"]) == ("batch/v1", "Job")
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == ENV["DEVICES"]
    assert int(ENV["BLOCKS"]) % spec["completions"] == 0
    assert POD["restartPolicy"] == "OnFailure"
    resources = CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit()
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in POD["volumes"]
    }
    # The device plugin sets which GPU.
    assert "CUDA_VISIBLE_DEVICES" not in ENV


def test_the_command_uses_no_variable_that_nobody_sets() -> None:
    script = CONTAINER["args"][0]
    used = set(re.findall(r"\$\{?([A-Z_]+)", script))
    assert used == {*ENV, "JOB_COMPLETION_INDEX", "PATH", "PWD"} - {"BLOCKS", "DEVICES", "HF_HOME"}
    assert {"BLOCKS", "DEVICES", "JOB_COMPLETION_INDEX"} <= set(re.findall(r"[A-Z_]+", script))
    subprocess.run([*CONTAINER["command"], "-n", script], check=True)


def with_two_slots(text: str) -> str:
    """Two devices on this machine: the pods' GPUs are slots here."""
    slots = [f"{{id: {name}, cpus: '{cpu}'}}" for name, cpu in zip("ab", CPUS, strict=True)]
    return smaller(text).replace("blocks: 1", "blocks: 2") + f"devices: [{', '.join(slots)}]\n"


def start_pod(folder: Path, index: int) -> subprocess.Popen[bytes]:
    """The container's command, as the pod of this index runs it."""
    with (folder / f"pod{index}.log").open("wb") as log:
        return subprocess.Popen(
            [*CONTAINER["command"], *CONTAINER["args"]],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={
                **environment(folder),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "STUDY": "tiny", "CONFIG": "study.yaml", "BLOCKS": "2", "DEVICES": "2",
                "RATES": "results/tiny/reference_rates.json", "JOB_COMPLETION_INDEX": str(index),
            },
        )  # fmt: skip


def starts(folder: Path) -> dict[str, int]:
    """How often each launch's server was started."""
    files = folder.glob("results/tiny/runs/*/block*/*/attempts.json")
    return {path.parent.relative_to(folder).as_posix(): len(read_json(path)) for path in files}


@pytest.mark.workflow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(CPUS) < 2, reason="two devices are two CPUs here")
def test_the_pods_measure_a_study_and_a_lost_file_is_noticed(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study", with_two_slots)
    (folder / "Snakefile").write_text(f'include: "{ROOT}/Snakefile"\n')
    pods = [start_pod(folder, index) for index in range(2)]
    for index, pod in enumerate(pods):
        assert pod.wait(timeout=400) == 0, (folder / f"pod{index}.log").read_text()
    once = starts(folder)
    # plain, noop_connector and plain_2 in A and B, plain and plain_2 in Bp, which may be skipped.
    assert len(once) in (12, 16)
    assert set(once.values()) == {1}
    # A record is lost on the volume: the study is not complete.
    lost = next(folder.glob("results/tiny/runs/noop_connector/block1/B/*/requests_*"))
    lost.unlink()
    done = run(folder, "all")
    assert done.returncode != 0
    assert lost.name in done.stdout + done.stderr
    assert not (folder / "results" / "tiny" / "complete.json").exists()
    # An index too: its block is carried on.
    shutil.move(lost.parents[1] / "index.json", folder / "index.json")
    done = run(folder, "all", options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "results" / "tiny" / "complete.json").exists()
    again = starts(folder)
    launch = lost.parents[1].relative_to(folder).as_posix()
    assert again == {**once, launch: 2}
    done = run(folder, "audit")
    assert done.returncode == 0, done.stdout
