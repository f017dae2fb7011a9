"""Test Snakemake's plans and rejections, and that every measurement has a reason."""

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from connector_tax.config import ROOT
from connector_tax.study.device import hold_devices
from tests.workflow.harness import SNAKEMAKE, TINY, command, ended, prepare, run

MEASURING = ("phase_a", "phase_b", "phase_bp", "preflight")
# Rules that run again when their code changes, with the folder of their command.
REMADE = {
    "reference_rates": "analysis",
    "analyse": "report",
}
PACKAGE = ROOT / "scripts" / "connector_tax"
SNAKEFILE = str(ROOT / "Snakefile")
MODULE = """
configfile: "config/config.yaml"

module connector_tax:
    snakefile: "{root}/workflow/Snakefile"
    config: config["connector_tax"]

use rule * from connector_tax as ct_*

rule everything:
    default_target: True
    input:
        rules.ct_all.input,
"""

# A minimal executor for Snakemake, which transfers files.
PLUGIN = """
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=True,
    job_deploy_sources=False,
    can_transfer_local_files=True,
)

class Executor(RemoteExecutor):
    def run_job(self, job):
        raise AssertionError("a job was started")

    async def check_active_jobs(self, active_jobs):
        raise AssertionError("a job was started")
        yield

    def cancel_jobs(self, active_jobs):
        pass
"""


def planned(output: str) -> dict[str, int]:
    """Return the number of jobs by rule, from the table that a dry run prints first."""
    rows = [line.split() for line in output.split("Job stats:")[1].splitlines()[1:]]
    table = [row for row in rows if len(row) == 2 and row[1].isdigit()]
    return {name: int(count) for name, count in table}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path / "study")


def planning(folder: Path, *options: str) -> str:
    """Return Snakemake's plan for a folder."""
    done = ended([SNAKEMAKE, "--dry-run", "--quiet", "host", *options], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a dry run of the workflow catalog's study, in a folder with nothing else."""
    folder = tmp_path_factory.mktemp("dry") / "x"
    shutil.copytree(ROOT / ".test", folder)
    return planning(folder, "--snakefile", str(ROOT / "workflow" / "Snakefile"))


def jobs_inputs(rule: str, dry_run: str) -> list[set[str]]:
    """Return input files of each planned job of a rule."""
    lines = re.findall(rf"^rule {rule}:\n(?:.*\n)*?    input: (.*)$", dry_run, re.M)
    return [set(line.split(", ")) for line in lines]


def inputs_of(rule: str, dry_run: str) -> set[str]:
    """Return input files of every planned job of a rule."""
    return set().union(*jobs_inputs(rule, dry_run))


def blocks_of(names: set[str]) -> set[int]:
    """Return the numbers of the blocks whose files are among these."""
    return {int(number) for name in names for number in re.findall(r"/block(\d+)/", name)}


def test_every_job_is_planned_from_the_start(dry_run: str) -> None:
    jobs = planned(dry_run)
    assert jobs["phase_a"] == jobs["phase_b"] == jobs["phase_bp"] == 1
    assert jobs["analyse"] == jobs["all"] == 1
    # Phases B and B' wait for the rates, and B' also for B.
    rates = "results/tiny/reference_rates.json"
    assert rates not in inputs_of("phase_a", dry_run)
    assert rates in inputs_of("phase_b", dry_run) & inputs_of("phase_bp", dry_run)
    assert "results/tiny/runs/plain/block0/B/index.json" in inputs_of("phase_bp", dry_run)


def imported(path: Path) -> Iterator[Path]:
    """Yield files of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("connector_tax."):
            module = PACKAGE.joinpath(*(node.module or "").split(".")[1:])
            names = [module, *(module / alias.name for alias in node.names)]
            files = [p for name in names for p in (name.with_suffix(".py"), name / "__init__.py")]
            yield from (file for file in files if file.is_file())


@pytest.mark.parametrize("rule", REMADE)
def test_analysis_rules_depend_on_all_their_code(rule: str, dry_run: str) -> None:
    code = {Path(name) for name in inputs_of(rule, dry_run) if name.endswith(".py")}
    assert set((PACKAGE / REMADE[rule]).glob("*.py")) <= code
    missing = {str(used.relative_to(PACKAGE)) for path in code for used in imported(path)} - {
        str(path.relative_to(PACKAGE)) for path in code
    }
    assert missing == set()


def test_no_job_depends_on_a_benchmark_or_a_test(dry_run: str) -> None:
    names = {
        n for line in re.findall(r"^    input: (.*)$", dry_run, re.M) for n in line.split(", ")
    }
    code = {path.relative_to(ROOT).parts[0] for name in names if (path := Path(name)).is_absolute()}
    assert code == {"scripts"}


def test_study_of_an_older_release_still_plans_its_remaining_jobs(folder: Path) -> None:
    assert run(folder, "environment").returncode == 0
    # Another code version in the metadata, as after an older release; env.txt is an `ancient`
    # input.
    for record in (folder / ".snakemake/metadata").iterdir():
        record.write_text(json.dumps({**json.loads(record.read_text()), "code": "another"}))
    done = run(folder, "all", options=("--dry-run",))
    jobs = planned(done.stdout + done.stderr)
    assert {"preflight", "phase_a", "analyse"} <= set(jobs)
    assert not {"study", "environment"} & set(jobs)


@pytest.mark.parametrize(
    ("name", "blocks"), [("config.yaml", 3), ("h20.yaml", 1), ("vllm-cpu.yaml", 3)]
)
def test_the_shipped_studies_plan_one_job_for_each_block(
    tmp_path: Path, name: str, blocks: int
) -> None:
    # The default study needs no option.
    options = () if name == "config.yaml" else ("--configfile", str(ROOT / "config" / name))
    plan = planning(tmp_path, "--snakefile", SNAKEFILE, *options)
    assert planned(plan)["phase_b"] == blocks
    # The rates wait for all blocks of Phase A; after that a block waits only for itself.
    assert blocks_of(inputs_of("reference_rates", plan)) == set(range(blocks))
    assert [blocks_of(names) for names in jobs_inputs("phase_b", plan)] == [set()] * blocks
    waits = [blocks_of(names) for names in jobs_inputs("phase_bp", plan)]
    assert sorted(waits, key=min) == [{block} for block in range(blocks)]
    # The environment of vLLM stays in the checkout.
    if name == "vllm-cpu.yaml":
        stamp = ROOT / "envs" / "vllm-cpu" / ".venv" / "built.json"
        assert os.path.relpath(stamp, tmp_path) in inputs_of("environment", plan)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("floor_s: 0.8", "floor_s: -1", "study.yaml: cell.floor_s: found -1; allowed: > 0"),
        ("seed: 7", "seed: 7\nseed: 8", "not valid YAML: found key 'seed' a second time"),
    ],
)
def test_a_broken_configuration_stops_before_anything_starts(
    folder: Path, old: str, new: str, words: str
) -> None:
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace(old, new))
    done = run(folder, "all")
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert not (folder / "results").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("all",), "all: no such file; what is to be made comes after --"),
        (("tab.yaml", "--", "all"), "tab.yaml: line 2: not valid YAML: found character"),
        (("self.yaml", "--", "all"), "self.yaml: line 1: found alias *c inside the value that"),
        (("empty.yaml", "--", "all"), "empty.yaml: found NoneType; allowed: keys with values"),
    ],
)
def test_bad_overlay_file_gives_a_one_line_error(
    folder: Path, files: tuple[str, ...], words: str
) -> None:
    (folder / "tab.yaml").write_text("cell:\n\tfloor_s: 1\n")
    (folder / "self.yaml").write_text("cell: &c {floor_s: 1, more: *c}\n")
    (folder / "empty.yaml").write_text("# nothing\n")
    done = ended([SNAKEMAKE, "-s", SNAKEFILE, "--configfile", "study.yaml", *files], folder)
    assert done.returncode == 1
    lines = (done.stdout + done.stderr).splitlines()
    (message,) = [line for line in lines if "profile" not in line]
    assert words in message


@pytest.mark.parametrize("others", [(), ("plan",)])
def test_failed_doctor_rule_ends_with_the_doctors_message(
    folder: Path, others: tuple[str, ...]
) -> None:
    config = yaml.safe_load((folder / "study.yaml").read_text())
    config["server"]["device"] = "test_unfit"
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    with hold_devices(["test_unfit"]):
        done = run(folder, "doctor", *others)
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "NOT FIT for this study: device" in output
    # With other targets the rule remains a failed job.
    assert ("RuleException" in output) == bool(others)


def test_workflow_as_a_module_has_every_rule_with_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    config = {"connector_tax": yaml.safe_load(TINY.read_text())}
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "Snakefile").write_text(MODULE.format(root=ROOT))
    jobs = planned(planning(tmp_path))
    assert jobs["ct_phase_a"] == jobs["ct_phase_b"] == jobs["ct_phase_bp"] == 1
    assert jobs["ct_complete"] == 1


def elsewhere(
    tmp_path: Path, edit: Callable[[str], str] = str, *, shared: bool
) -> tuple[Path, str]:
    """Return a study's folder, and Snakemake's output of a run there with that executor."""
    folder = prepare(tmp_path / "study", edit)
    plugin = tmp_path / "plugins" / "snakemake_executor_plugin_elsewhere"
    plugin.mkdir(parents=True)
    text = PLUGIN.replace("implies_no_shared_fs=True", f"implies_no_shared_fs={not shared}")
    (plugin / "__init__.py").write_text(text)
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    options = ("--executor", "elsewhere", "--jobs", "2")
    done = ended(command(folder, "all", options=options), folder, PYTHONPATH=path)
    assert done.returncode != 0
    return folder, done.stdout + done.stderr


def test_an_executor_without_a_shared_file_system_is_refused(tmp_path: Path) -> None:
    folder, output = elsewhere(tmp_path, shared=False)
    assert "--executor: found one without a shared file system; allowed: local" in output, output
    assert not (folder / "results").exists()


def test_slots_are_refused_with_an_executor(tmp_path: Path) -> None:
    def edit(text: str) -> str:
        return f"{text}devices: [{{id: a, cpus: '0'}}]\n"

    folder, output = elsewhere(tmp_path, edit, shared=True)
    assert "devices: found a with --executor; allowed: no such section" in output, output
    assert not (folder / "results").exists()


def test_every_job_has_the_packages_of_the_lock() -> None:
    """Plan with --sdm conda, and compare the packages of the environment with the lock."""
    pinned = re.findall(
        r"^([a-z0-9][^ ]*==[^ ;]+)", (ROOT / "envs/pipeline.lock").read_text(), re.M
    )
    (environment,) = (ROOT / "workflow" / "envs").glob("*.yaml")
    content = yaml.safe_load(environment.read_text())
    (packages,) = (entry["pip"] for entry in content["dependencies"] if isinstance(entry, dict))
    assert [package.split(" ")[0] for package in packages] == pinned
    rules = [path.read_text() for path in (ROOT / "workflow").rglob("*.smk")]
    for text in [*rules, (ROOT / "workflow" / "Snakefile").read_text()]:
        assert text.count("shell:\n") == len(re.findall(r"conda:\n +CONDA\n", text))


@pytest.mark.parametrize("profile", ["profiles/default", "workflow/profiles/slurm"])
def test_user_id_without_a_passwd_entry_can_plan_a_study(tmp_path: Path, profile: str) -> None:
    other = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*other, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    names = [option for name in ("LOGNAME", "USER", "LNAME", "USERNAME") for option in ("-u", name)]
    folder = prepare(tmp_path)
    # The executor's plugin is not installed, and a dry run needs none.
    lines = (ROOT / profile / "config.yaml").read_text().splitlines(keepends=True)
    (tmp_path / "config.yaml").write_text(
        "".join(line for line in lines if not line.startswith(("executor:", "slurm-")))
    )
    options = ("-n", "--workflow-profile", str(tmp_path))
    done = ended([*other, "env", *names, *command(folder, "all", options=options)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
