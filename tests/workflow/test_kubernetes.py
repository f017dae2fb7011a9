"""The Job of workflow/kubernetes: its fields agree, and its command measures a study."""

import copy
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json
from connector_tax.study.block import end_s
from tests.workflow.harness import environment, prepare, run
from tests.workflow.kubernetes_api import Cluster, Refused
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


def measuring(folder: Path) -> dict[str, Any]:
    """The Job, of the study in `folder`."""
    job = copy.deepcopy(JOB)
    values = {
        "STUDY": "tiny", "CONFIG": "study.yaml", "BLOCKS": "2", "DEVICES": "2",
        "RATES": "results/tiny/reference_rates.json", "HF_HOME": str(folder / "cache"),
    }  # fmt: skip
    job["metadata"]["name"] = "tiny"
    job["spec"] |= {"completions": 2, "parallelism": 2}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": name, "value": value} for name, value in values.items()]
    return job


def image(folder: Path) -> dict[str, str]:
    """What a container finds in its environment: this project's interpreter, first."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**environment(folder), "PATH": programs}


def of_script(script: str, **spec: Any) -> dict[str, Any]:
    """A Job whose pods run `script`."""
    job = copy.deepcopy(JOB)
    job["spec"] |= spec
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["args"] = [script]
    return job


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_the_job_is_one_of_kubernetes(version: str) -> None:
    kubernetes_validate.validate(JOB, version, strict=True)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["parallelism"], "4", "spec.parallelism: '4' is not of type"),
        (["completionsMode"], "Indexed", "'completionsMode' was unexpected"),
        (["template", "spec", "containers", 0, "resources", "cpu"], "1", "'cpu' was unexpected"),
        (["template", "spec", "containers", 0, "env", 2, "value"], 4, "value: 4 is not of type"),
    ],
)
def test_the_api_refuses_what_is_no_job(
    tmp_path: Path, path: list[str | int], value: object, told: str
) -> None:
    job = copy.deepcopy(JOB)
    place = job["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with Cluster(tmp_path, {}) as cluster, pytest.raises(Refused, match=re.escape(told)):
        cluster.apply(job)
    assert cluster.starts == []


def test_each_index_has_its_pod_and_no_more_run_at_once_than_the_job_says(tmp_path: Path) -> None:
    # Each waits for the other of its pair, so that two must run at once, and no third begins.
    script = """
    touch $JOB_COMPLETION_INDEX.begun
    until [ -e $((JOB_COMPLETION_INDEX ^ 1)).begun ]; do sleep 0.01; done
    """
    with Cluster(tmp_path, dict(os.environ)) as cluster:
        name = cluster.apply(of_script(script, completions=4, parallelism=2))["metadata"]["name"]
        assert cluster.wait(name, 60) == "Complete"
        assert cluster.status(name)["succeeded"] == 4
    assert sorted(cluster.starts) == [0, 1, 2, 3]
    assert cluster.most_at_once == 2


@pytest.mark.parametrize(("limit", "ends"), [(2, "Complete"), (1, "Failed")])
def test_a_container_that_fails_is_started_again_up_to_the_limit(
    tmp_path: Path, limit: int, ends: str
) -> None:
    script = "echo >>tries; [ $(wc -l <tries) -gt 2 ]"
    with Cluster(tmp_path, dict(os.environ)) as cluster:
        job = of_script(script, completions=1, parallelism=1, backoffLimit=limit)
        name = cluster.apply(job)["metadata"]["name"]
        assert cluster.wait(name, 60) == ends
        assert cluster.status(name)["failed"] == 2
    assert len(cluster.starts) == limit + 1


def logs(folder: Path) -> str:
    """What the pods said."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("pod*.log")))


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
    with Cluster(folder, image(folder)) as cluster:
        cluster.apply(measuring(folder))
        # A container ends in the midst of a cell: its pod goes on at that cell.
        begun = folder / "results/tiny/runs"
        index = 1
        while not list(begun.glob(f"*/block{index}/A/*.partial")):
            assert cluster.status("tiny").get("conditions") is None, logs(folder)
            time.sleep(0.05)
        cluster.kill(index)
        assert cluster.wait("tiny", 600) == "Complete", logs(folder)
        assert cluster.status("tiny")["failed"] == 1
    assert sorted(cluster.starts) == [0, 1, 1]
    assert cluster.most_at_once == 2
    once = starts(folder)
    # plain, noop_connector and plain_2 in A and B, plain and plain_2 in Bp, which may be skipped.
    assert len(once) in (12, 16)
    assert sorted(once.values())[-2:] == [1, 2]
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
    assert again == {**once, launch: once[launch] + 1}
    done = run(folder, "audit")
    assert done.returncode == 0, done.stdout
