"""Write a small study's folder, and run the driver on one of its launches without Snakemake."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from connector_tax.files import read_json
from connector_tax.study.design import resolve
from connector_tax.study.guard import PARENT_VARIABLE
from tests.study_folder import write_stages
from tests.workflow.harness import TINY, device_for, smaller

# Answers 200 to everything on a port of 127.0.0.1, which it prints; 0: one that is free.
ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def write_study(
    root: Path,
    faults: list[dict[str, Any]] | None = None,
    engine: dict[str, Any] | None = None,
) -> Path:
    """Write study.json and the files that it needs; return the path of study.json.

    Args:
        root: the study's folder.
        faults: fault rules of the embedded engine (engine/faults.py).
        engine: in place of the section of the study file.
    """
    config = yaml.safe_load(smaller(TINY.read_text()))
    # One device for each folder: tests must not wait for each other.
    config["server"]["device"] = device_for(root)
    config["engine"] = engine or config["engine"]
    study = resolve(config, "tiny.yaml")
    if faults:
        definition = study["config"]["engine"]["definition_content"]
        definition["faults"] = {"seed": 1, "rules": faults}
    return write_stages(root, study)


def arguments(study_file: Path, config: str = "plain", phase: str = "A") -> list[str]:
    """Return the driver's command line arguments for a launch."""
    log = study_file.parent / "logs" / f"{config}.block0.{phase}.log"
    return ["--study", str(study_file), "--config", config, "--block", "0", "--phase", phase,
            "--log", str(log)]  # fmt: skip


def start_driver(
    study_file: Path, environment: Mapping[str, str] | None = None, *prefix: str
) -> subprocess.Popen[str]:
    """Start the driver of plain's Phase A and return it; `prefix` is a command that starts it."""
    inherited = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "connector_tax.study.launch", *arguments(study_file)],
        env={**inherited, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def as_user(uid: int) -> list[str]:
    """Return a prefix that runs root's command as another user, who may read this interpreter."""
    reading = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *reading]


def drive(
    study_file: Path, environment: Mapping[str, str] | None = None, *prefix: str
) -> subprocess.CompletedProcess[str]:
    """Run the driver of plain's Phase A to its end."""
    process = start_driver(study_file, environment, *prefix)
    output, _ = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def launch_folder(study_file: Path) -> Path:
    """Return the folder of plain's Phase A."""
    return study_file.parent / "runs" / "plain" / "block0" / "A"


def index_of(study_file: Path) -> dict[str, Any]:
    """Return the index of plain's Phase A."""
    index: dict[str, Any] = read_json(launch_folder(study_file) / "index.json")
    return index


def failed_index_of(study_file: Path) -> dict[str, Any]:
    """Return the index of plain's Phase A, which failed and is to be measured again."""
    assert not (launch_folder(study_file) / "index.json").exists()
    index: dict[str, Any] = read_json(launch_folder(study_file) / "index.failed.json")
    return index
