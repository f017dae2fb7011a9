"""What Snakemake plans: every job from the start, and no measurement without a reason."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from connector_tax.config import ROOT
from tests.workflow.harness import prepare, run

MEASURING = ("phase_a", "phase_b", "phase_bp", "preflight")
# What is remade when its code changes, and the folder its command lies in.
REMADE = {
    "reference_rates": "analysis",
    "aggregate": "analysis",
    "figure": "figures",
    "report_html": "report",
}
PACKAGE = ROOT / "scripts" / "connector_tax"


def planned(output: str) -> dict[str, int]:
    """Jobs by rule from the table a dry run prints first."""
    rows = [line.split() for line in output.split("Job stats:")[1].splitlines()[1:]]
    table = [row for row in rows if len(row) == 2 and row[1].isdigit()]
    return {name: int(count) for name, count in table}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path / "study")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run(prepare(tmp_path_factory.mktemp("dry") / "study"), "all", options=("--dry-run",))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def jobs_inputs(rule: str, dry_run: str) -> list[set[str]]:
    """Input files of each planned job of a rule."""
    lines = re.findall(rf"^rule {rule}:\n(?:.*\n)*?    input: (.*)$", dry_run, re.M)
    return [set(line.split(", ")) for line in lines]


def inputs_of(rule: str, dry_run: str) -> set[str]:
    """Input files of every planned job of a rule."""
    return set().union(*jobs_inputs(rule, dry_run))


def blocks_of(names: set[str]) -> set[int]:
    """The blocks whose files are among these."""
    return {int(number) for name in names for number in re.findall(r"/block(\d+)/", name)}


def test_every_job_is_planned_from_the_start(dry_run: str) -> None:
    jobs = planned(dry_run)
    assert jobs["phase_a"] == jobs["phase_b"] == jobs["phase_bp"] == 1
    assert jobs["figure"] >= 8


def imported(path: Path) -> Iterator[Path]:
    """Files of the package that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("connector_tax."):
            module = PACKAGE.joinpath(*(node.module or "").split(".")[1:])
            names = [module, *(module / alias.name for alias in node.names)]
            files = [p for name in names for p in (name.with_suffix(".py"), name / "__init__.py")]
            yield from (file for file in files if file.is_file())


@pytest.mark.parametrize("rule", REMADE)
def test_what_is_remade_depends_on_all_the_code_that_makes_it(rule: str, dry_run: str) -> None:
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


def test_a_rule_reworded_since_hides_nothing_of_what_is_to_be_made(folder: Path) -> None:
    assert run(folder, "environment").returncode == 0
    # As an older release left it; env.txt is `ancient` for whatever reads it.
    for record in (folder / ".snakemake/metadata").iterdir():
        record.write_text(json.dumps({**json.loads(record.read_text()), "code": "another"}))
    done = run(folder, "all", options=("--dry-run",))
    jobs = planned(done.stdout + done.stderr)
    assert {"preflight", "phase_a", "report_html"} <= set(jobs)
    assert not {"study", "environment"} & set(jobs)


@pytest.mark.parametrize(("name", "blocks"), [("config.yaml", 3), ("h20.yaml", 1)])
def test_the_shipped_studies_plan_one_job_for_each_block(
    folder: Path, name: str, blocks: int
) -> None:
    (folder / "study.yaml").write_text((ROOT / "config" / name).read_text())
    done = run(folder, "all", options=("--dry-run",))
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert planned(said)["phase_b"] == blocks
    # All of Phase A is waited for; after it a block waits for itself alone.
    assert blocks_of(inputs_of("reference_rates", said)) == set(range(blocks))
    assert [blocks_of(names) for names in jobs_inputs("phase_b", said)] == [set()] * blocks
    waits = [blocks_of(names) for names in jobs_inputs("phase_bp", said)]
    assert sorted(waits, key=min) == [{block} for block in range(blocks)]


def test_a_broken_configuration_stops_before_anything_starts(folder: Path) -> None:
    text = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(text.replace("floor_s: 0.8", "floor_s: -1"))
    done = run(folder, "all")
    assert done.returncode != 0
    assert "study.yaml: cell.floor_s: found -1; allowed: > 0" in done.stdout + done.stderr
    assert not (folder / "results").exists()


PROFILE = ("--workflow-profile", str(ROOT / "profiles" / "default"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ("nothere.yaml", "--", "all"),
            "nothere.yaml: no such file; what is to be made",
        ),
        (("all",), "all: no such file; what is to be made comes after --"),
        (("tab.yaml", "--", "all"), "tab.yaml: line 2: not valid YAML: found character"),
        (("broken.yaml", "--", "all"), "broken.yaml: line 2: not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_laid_over_is_one_line(
    folder: Path, files: tuple[str, ...], said: str
) -> None:
    (folder / "tab.yaml").write_text("cell:\n\tfloor_s: 1\n")
    (folder / "broken.yaml").write_text("blocks: [1,\n")
    snakemake = str(Path(sys.executable).with_name("snakemake"))
    done = subprocess.run(
        [snakemake, "-s", str(ROOT / "Snakefile"), *PROFILE, "--configfile", "study.yaml", *files],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    told = [line for line in (done.stdout + done.stderr).splitlines() if "profile" not in line]
    assert len(told) == 1
    assert said in told[0]


def test_a_key_that_stands_twice_is_refused(folder: Path) -> None:
    with (folder / "study.yaml").open("a") as file:
        file.write("blocks: 2\n")
    done = run(folder, "all", options=("--dry-run",))
    assert done.returncode != 0
    assert "not valid YAML: found key 'blocks' a second time" in done.stdout + done.stderr


def test_the_catalogs_own_study_is_planned(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".test", tmp_path / "x")
    snakemake = str(Path(sys.executable).with_name("snakemake"))
    done = subprocess.run(
        [snakemake, "-s", str(ROOT / "workflow" / "Snakefile"), "-d", str(tmp_path / "x"), "-n"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert planned(done.stdout + done.stderr)["all"] == 1


def test_every_job_has_the_packages_of_the_lock() -> None:
    """With --sdm conda; and the environment has what the lock has."""
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


def test_the_dag_can_be_drawn(folder: Path) -> None:
    done = run(folder, "all", options=("--dag",))
    assert done.returncode == 0
    assert "digraph" in done.stdout
    assert "phase_a" in done.stdout
