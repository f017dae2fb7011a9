"""Test blocks on the nodes of a real Slurm: whole, on one node each, through kills."""

import fcntl
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_tax.config import ROOT
from connector_tax.files import read_json
from tests.workflow.harness import (
    environment,
    kill_tree,
    passed_claims,
    prepare,
    smaller,
    wait_for,
)

pytestmark = [pytest.mark.workflow, pytest.mark.long, pytest.mark.timeout(900)]
CLUSTER = Path(__file__).with_name("cluster.sh")
# A job that holds its GPU until two jobs hold one each.
HOLD_GPU = """
import json, os, sys, time
from pathlib import Path
from connector_tax.study.device import hold_devices
from connector_tax.study.device import describe_node
node = describe_node({"engine": {"kind": "vllm", "device": "cuda"}})
folder = Path(sys.argv[1])
with hold_devices(node["devices"]):
    (folder / "writing").mkdir(exist_ok=True)
    written = folder / "writing" / f"{os.getpid()}"
    written.write_text(json.dumps(node))
    written.rename(folder / f"{os.getpid()}.json")
    until = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
"""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "pkill")
DEBIAN = "apt install slurmctld slurmd slurm-client munge iproute2 procps"


class Cluster:
    """A Slurm of two nodes, and Snakemake on a study in the folder that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def study(self, name: str, floor_s: float = 0.6) -> Path:
        def edit(text: str) -> str:
            longer = f"floor_s: {floor_s}, cap_s: 9"
            text = smaller(text).replace("floor_s: 0.6, cap_s: 3", longer)
            return text.replace("blocks: 1", "blocks: 2")

        return prepare(self.folder / name, edit)

    def command(
        self, study: Path, *targets: str, config: str, options: tuple[str, ...]
    ) -> list[str]:
        return [
            sys.executable,
            str(Path(__file__).with_name("prompt_snakemake.py")),
            *("--snakefile", str(ROOT / "Snakefile"), "--directory", str(study)),
            *("--workflow-profile", str(ROOT / "workflow" / "profiles" / "slurm")),
            *("--slurm-init-seconds-before-status-checks", "1"),
            *("--configfile", str(study / config), *options, "--", *targets),
        ]

    def environment(self, study: Path) -> dict[str, str]:
        # The nodes have separate temporary folders.
        own = {k: v for k, v in environment(study).items() if k != "TMPDIR"}
        return {**own, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def run(
        self, study: Path, *targets: str, config: str = "study.yaml", options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(study, *targets, config=config, options=options),
            env=self.environment(study), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    def start(self, study: Path, config: str = "study.yaml") -> subprocess.Popen[bytes]:
        """Start the whole study in its own process group; its output goes to `<config>.log`."""
        with (study / f"{config}.log").open("wb") as log:
            return subprocess.Popen(
                self.command(study, "all", config=config, options=()),
                env=self.environment(study), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def cancel_all(self, study: Path) -> None:
        """End every job, and wait until Slurm has none that runs or waits."""
        left = 'while [ -n "$(squeue --noheader)" ]; do sleep 0.2; done'
        script = f"scancel --user=root; {left}"
        subprocess.run(["bash", "-c", script], env=self.environment(study), check=True, timeout=90)

    def drive_here(self, study: Path) -> subprocess.CompletedProcess[str]:
        """Return the driver of block 0's Phase A on this machine, which is not one of the nodes."""
        results = study / "results" / "tiny"
        return subprocess.run(
            [sys.executable, "-m", "connector_tax.study.block", "--study", results / "study.json",
             "--block", "0", "--phase", "A", "--logs", results / "logs"],
            env=self.environment(study), capture_output=True, text=True, timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [f"{name} ({DEBIAN})" for name in PROGRAMS if shutil.which(name) is None]
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        missing.append("snakemake-executor-plugin-slurm (make slurm)")
    if os.geteuid() != 0:
        missing.append("root")
    if not missing:
        tried = subprocess.run([CLUSTER, "try", "."], capture_output=True, text=True, timeout=60)
        if tried.returncode != 0:
            missing.append(f"namespaces, a bridge and device nodes: {tried.stderr.strip()}")
    if missing:
        pytest.skip(f"two slurmd's need: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("cluster")
    # A machine holds one such cluster: its bridge, namespaces and addresses have fixed names.
    with Path("/run/connector-tax-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            subprocess.run([CLUSTER, "up", folder], check=True, timeout=60)
            yield Cluster(folder)
        finally:
            subprocess.run([CLUSTER, "down", folder], check=False, timeout=60)


def attempts(study: Path, name: str = "tiny", block: int | str = "*") -> list[dict[str, Any]]:
    """Return every start of a server, of all phases."""
    files = study.glob(f"results/{name}/runs/*/block{block}/*/attempts.json")
    return [entry for path in files for entry in read_json(path)]


def nodes(study: Path, block: int) -> set[str]:
    """Return the machines that the attempts of a block ran on."""
    return {attempt["node"]["machine"] for attempt in attempts(study, block=block)}


def audited(cluster: Cluster, study: Path, name: str = "tiny", config: str = "study.yaml") -> None:
    done = cluster.run(study, "audit", config=config)
    assert done.returncode == 0, done.stdout
    passed = passed_claims(study / "results" / name)
    assert {("order", f"block{k}/{phase}") for k in range(2) for phase in "AB"} <= passed
    assert ("device", "study") in passed


def test_two_nodes_measure_one_block_each(cluster: Cluster) -> None:
    study = cluster.study("two")
    done = cluster.run(study, "all")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    # Other rules ran on this machine (`localrule`); `environment` runs on a measuring machine.
    jobs = {"environment", "preflight", "patch_apply", "phase_a", "phase_b", "phase_bp"}
    assert set(re.findall(r"^rule (\w+):", output, re.M)) == jobs
    first, second = nodes(study, 0), nodes(study, 1)
    assert len(first) == len(second) == 1
    assert first != second
    assert all(attempt["node"]["exclusive"] for attempt in attempts(study))
    audited(cluster, study)


def test_two_studies_at_once_share_a_folder_and_the_nodes(cluster: Cluster) -> None:
    study = cluster.study("both")
    files = {"tiny": "study.yaml", "other": "other.yaml"}
    text = (study / "study.yaml").read_text()
    (study / "other.yaml").write_text(text.replace("study: tiny", "study: other"))
    heads = {name: cluster.start(study, config) for name, config in files.items()}
    for name, head in heads.items():
        assert head.wait(timeout=800) == 0, (study / f"{files[name]}.log").read_text()
    of_machine: dict[str, list[dict[str, Any]]] = {}
    for name, config in files.items():
        audited(cluster, study, name, config)
        for attempt in attempts(study, name):
            of_machine.setdefault(attempt["node"]["machine"], []).append(attempt)
    assert len(of_machine) == 2
    for beside in of_machine.values():
        spans = sorted((a["started_utc"], a["ended_utc"]) for a in beside)
        assert all(begun >= ended for (_, ended), (begun, _) in itertools.pairwise(spans))


def test_jobs_on_one_node_lock_only_their_gpu(cluster: Cluster) -> None:
    folder = cluster.folder / "gpus"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in *=index,uuid) printf '0, GPU-a\\n1, GPU-b\\n';; *) exit 9;; esac\n"
    )
    program.chmod(0o755)
    (folder / "hold.py").write_text(HOLD_GPU)
    inherited = cluster.environment(folder)
    inherited["PATH"] = f"{folder}{os.pathsep}{inherited['PATH']}"
    given = ["--partition=shared", "--nodelist=n1", "--gres=gpu:1", "--mem=100"]
    wrapped = f"{sys.executable} {folder}/hold.py {folder}"
    job = ["sbatch", "--wait", *given, "--output", f"{folder}/%j.log", "--wrap", wrapped]
    begun = [subprocess.Popen(job, env=inherited) for _ in range(2)]
    ended = [one.wait(timeout=120) for one in begun]
    assert ended == [0, 0], [log.read_text() for log in folder.glob("*.log")]
    held = [read_json(path) for path in folder.glob("*.json")]
    assert sorted(node["devices"] for node in held) == [["GPU-a"], ["GPU-b"]]
    assert len({node["machine"] for node in held}) == 1
    assert len({node["job"] for node in held}) == 2
    assert [node["exclusive"] for node in held] == [False, False]


def test_study_completes_after_snakemake_is_killed_and_its_job_cancelled(cluster: Cluster) -> None:
    study = cluster.study("killed", floor_s=6)
    head = cluster.start(study)
    runs = study / "results" / "tiny" / "runs"
    wait_for(lambda: any(runs.glob("*/block0/A/*.partial/metrics_*")), head, timeout_s=240)
    kill_tree(head)
    begun = nodes(study, 0)
    # The job continues without the Snakemake that submitted it.
    second = cluster.drive_here(study)
    assert second.returncode == 2, second.stderr
    assert "is being measured by process" in second.stderr
    cluster.cancel_all(study)
    second = cluster.drive_here(study)
    assert second.returncode == 2, second.stderr
    assert "block 0 was begun on another device" in second.stderr
    assert cluster.run(study, options=("--unlock",)).returncode == 0
    done = cluster.run(study, "all", options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert nodes(study, 0) == begun
    audited(cluster, study)


def test_jobs_end_after_their_cell_on_a_warning_signal(cluster: Cluster) -> None:
    study = cluster.study("warned", floor_s=6)
    head = cluster.start(study)
    runs = study / "results" / "tiny" / "runs"
    wait_for(
        lambda: all(list(runs.glob(f"*/block{k}/A/*.partial/metrics_*")) for k in range(2)),
        head,
        timeout_s=240,
    )
    begun = [path.with_suffix("") for path in runs.glob("*/block*/A/*.partial")]
    # Sent to every process of the jobs' steps, as Slurm does before a time limit.
    subprocess.run(
        ["scancel", "--signal=USR1", "--user=root"], env=cluster.environment(study), check=True
    )
    assert head.wait(timeout=120) != 0
    cells = {path: path.stat().st_mtime_ns for path in runs.glob("*/block*/A/r*/cell_*.json")}
    assert {path.parent for path in cells} == set(begun)
    assert not list(runs.glob("*/block*/A/*.partial"))
    on = [nodes(study, block) for block in range(2)]
    done = cluster.run(study, "all", options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in cells} == cells
    assert [nodes(study, block) for block in range(2)] == on
    audited(cluster, study)
