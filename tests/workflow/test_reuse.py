"""The workflow from another folder, and as a module of another workflow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from connector_tax.config import ROOT
from tests.workflow.harness import TINY, environment
from tests.workflow.test_dry_run import inputs_of, planned

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


def dry_run(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("snakemake")),
            "--dry-run",
            "--quiet",
            "host",
            *options,
        ],
        env=environment(folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_folder_with_a_configuration_of_its_own_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    shutil.copy(TINY, tmp_path / "config" / "config.yaml")
    output = dry_run(tmp_path, "--snakefile", str(ROOT / "Snakefile"))
    assert planned(output)["phase_a"] == 1
    # Two of the three phases wait for the rates; the last for the one before it, too.
    rates = "results/tiny/reference_rates.json"
    assert rates not in inputs_of("phase_a", output)
    assert rates in inputs_of("phase_b", output) & inputs_of("phase_bp", output)
    assert "results/tiny/runs/plain/block0/B/index.json" in inputs_of("phase_bp", output)


def test_the_vllm_environment_stays_in_the_checkout(tmp_path: Path) -> None:
    config = ROOT / "config" / "vllm-cpu.yaml"
    options = ("--snakefile", str(ROOT / "Snakefile"), "--configfile", str(config))
    wanted = inputs_of("environment", dry_run(tmp_path, *options))
    stamp = ROOT / "envs" / "vllm-cpu" / ".venv" / "built.json"
    assert os.path.relpath(stamp, tmp_path) in wanted


def test_as_a_module_every_rule_is_there_under_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    config = {"connector_tax": yaml.safe_load(TINY.read_text())}
    (tmp_path / "config" / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "Snakefile").write_text(MODULE.format(root=ROOT))
    jobs = planned(dry_run(tmp_path))
    assert jobs["ct_phase_a"] == jobs["ct_phase_b"] == jobs["ct_phase_bp"] == 1
    assert jobs["ct_complete"] == 1
