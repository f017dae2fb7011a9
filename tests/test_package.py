"""Test the installed package: its command, its versions, the content of a wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from connector_tax import __version__
from connector_tax.__main__ import COMMANDS, usage
from connector_tax.config import ROOT

# Loaded by the command's process, so that only the standard library can be imported.
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("msgspec", "numpy", "httptools", "yaml", "rich", "uvloop", "zmq"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def call(
    *arguments: str, cwd: Path = ROOT, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    paths = [str(path or ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "connector_tax", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    text = (ROOT / "CHANGELOG.md").read_text()
    changes = re.search(r"^## ([\d.]+) \(20", text, re.M)
    assert changes is not None
    assert citation["version"] == changes[1]
    # Unreleased changes belong to a later version, marked .dev0.
    later = __version__.endswith(".dev0") and __version__ > changes[1]
    assert later if "## Unreleased" in text else __version__ == changes[1]
    assert call("--version").stdout == f"connector-tax {__version__}\n"


def test_workflows_pin_actions_to_commits() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line for file in files for line in re.findall(r"uses: (.+)", file.read_text())]
    assert len(used) > 10
    assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", one)] == []


def test_help_of_the_engine_begins_with_its_purpose() -> None:
    shown = call("engine", "--help").stdout
    assert shown.startswith("usage: connector-tax engine ")
    described = shown.split("\n\n")[1]
    assert described == "Serve one configuration of the embedded engine until SIGTERM or Ctrl-C."


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_is_listed_starts(name: str) -> None:
    assert name in usage()
    module = import_module(f"connector_tax.{COMMANDS[name].module}")
    assert callable(module.main)


def test_subcommand_receives_arguments_and_returns_its_exit_status() -> None:
    refused = call("plan", "--study", "no/such/study.json")
    assert refused.returncode == 2
    assert "no/such/study.json" in refused.stderr
    unknown = call("lodgen")
    assert unknown.returncode == 2
    assert "found 'lodgen'; allowed: ab, settings, loadgen, engine," in unknown.stderr
    removed = call("calibrate")
    assert removed.returncode == 2
    assert "calibrate was removed; run `python -m benchmarks.error_model virtual`" in removed.stderr


def test_a_missing_dependency_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    bare = Path(f"{tmp_path}{os.pathsep}{ROOT / 'scripts'}")
    assert call("--version", path=bare).returncode == 0
    done = call("loadgen", "--help", path=bare)
    assert done.returncode == 2
    assert "[loadgen]'" in done.stderr


def test_install_hint_names_the_wheel_or_clone_that_the_package_is_from(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    wheel = tmp_path / "a b.whl"
    wheel.touch()
    installed = tmp_path / "connector_tax-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: connector-tax\nVersion: 1\n")
    (installed / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
    done = call("engine", path=Path(f"{tmp_path}{os.pathsep}{ROOT / 'scripts'}"))
    assert f"pip install '{wheel}[engine]'" in done.stderr


def test_every_dependency_is_locked() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    names = {re.split(r"[\[=]", entry)[0] for entry in [*extras["loadgen"], *extras["study"]]}
    for lock in ("pipeline.lock", "dev.lock"):
        text = (ROOT / "envs" / lock).read_text()
        locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M))
        assert names - {"connector-tax"} <= locked.keys()
        assert project["build-system"]["requires"] == [f"setuptools=={locked['setuptools']}"]


def test_slurms_executor_is_locked_on_top_of_the_pipeline() -> None:
    pipeline, slurm = (
        set(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "envs" / lock).read_text(), re.M))
        for lock in ("pipeline.lock", "slurm.lock")
    )
    plugin = "snakemake-executor-plugin-slurm"
    assert {name for name, _ in slurm - pipeline} == {plugin, f"{plugin}-jobstep"}


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", ["--help", "loadgen --help", "loadgen --version"])
def test_closed_output_pipe_leaves_no_traceback(arguments: str, buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "connector_tax", *arguments.split()],
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
            stdout=writer,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.long
def test_installed_wheel_can_load_a_server_and_resolve_a_study(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(ROOT)], check=True)
    wheel = next(tmp_path.glob(f"connector_tax-{__version__}-*.whl"))
    package = tmp_path / "package"
    zipfile.ZipFile(wheel).extractall(package)
    assert not (package / "benchmarks").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = call("loadgen", "--help", cwd=elsewhere, path=package)
    assert "--ignore-eos" in shown.stdout
    resolve = (
        "import connector_tax; from connector_tax.config import DEFAULTS, load_yaml;"
        "from connector_tax.study.design import resolve;"
        "from connector_tax.settings.matrix import models_of, shipped;"
        "study = resolve(load_yaml(DEFAULTS / 'config.yaml'), 'x')['study'];"
        "print(connector_tax.__file__, study, models_of(shipped())[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", resolve],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    module = str(package / "connector_tax" / "__init__.py")
    assert done.stdout.split() == [module, "default", "Qwen3-8B"]


def test_ctrl_c_while_modules_load_leaves_no_traceback() -> None:
    program = """
import sys
class Stopped:
    def find_spec(self, name, path=None, target=None):
        if name == "connector_tax.ab":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stopped())
from connector_tax.__main__ import main
sys.exit(main(["ab"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_clone_with_autocrlf_keeps_the_bytes_of_every_file(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    shutil.copy(ROOT / ".gitattributes", origin)
    (origin / "page.md").write_bytes(b"one\ntwo\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *arguments], cwd=origin, check=True)
    command = ["git", "clone", "-q", "-c", "core.autocrlf=true", str(origin), "clone"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "clone" / "page.md").read_bytes() == b"one\ntwo\n"
