"""The files of a study, grouped by the part of the study that they belong to.

Names in capitals are relative to the folder of the study, launch or cell. Their content:
docs/artifacts.md.
"""

from pathlib import Path

# Files of a study, below results/<study>/.
STUDY = "study.json"
ENVIRONMENT = "environment.json"
ENV_TEXT = "env.txt"
MODEL = "model.json"
PREFLIGHT = "preflight"
PREFLIGHT_STATUS = f"{PREFLIGHT}/preflight_status.json"
SHAPE_RATES = f"{PREFLIGHT}/shape_rates.json"
PATCH = "patch"
PATCH_STATUS = f"{PATCH}/patch_status.json"
REVERT_STATUS = f"{PATCH}/revert_status.json"
RUNS = "runs"
REFERENCE_RATES = "reference_rates.json"
# Only in a study with interim analyses.
LOOKS = "looks.json"
# Only in a study of `ab`: its arguments.
ARGUMENTS = "ab.json"
# Only in a study with a user's requests: the lines that it may send.
TRAFFIC = "traffic.jsonl"
# Only in an unpacked study: SHA-256, name and bytes of its archive.
ORIGIN = "archive.sha256"
ANALYSIS = "analysis"
FIGURES = "figures"
REPORT = "report.html"
MANIFEST = "manifest.json"
MANIFEST_PAGE = "manifest.md"
AUDIT = "audit.json"
COMPLETE = "complete.json"
SEALS = "seals.jsonl"
SEALS_LOCK = ".seals.lock"
LOGS = "logs"
OWNERS = "owners"
DEVICES = "devices"
REHEARSAL_PAGE = "rehearsal.md"

# The analysis' tables, below ANALYSIS.
CELLS = "cells.csv"
EFFECTS = "effects.csv"
STEP_CDF = "step_cdf.csv"
ENGINE_TABLE = "engine.csv"
HYPOTHESES = "hypotheses.json"
ANALYSIS_FILES = (CELLS, EFFECTS, STEP_CDF, ENGINE_TABLE, HYPOTHESES)

# Files of a launch, below runs/<config>/block<k>/<phase>/ (names.Launch.folder). The index is
# written last: without it the launch has not ended.
INDEX = "index.json"
FAILED_INDEX = "index.failed.json"
DAMAGED_INDEX = "index.damaged.json"
ATTEMPTS = "attempts.json"
LAUNCH_CONFIG = "config.json"
LAUNCH_SCRIPT = "launch.sh"
STDOUT_LOG = "vllm_stdout.log"
STDERR_LOG = "vllm_stderr.log"
SUMMARY = "summary.json"
RESOURCES = "resources.json"
SETTINGS = "settings.json"
# Only with an emulated device: the coefficients of its time.
DEVICE_TIME = "device_time.json"
# Files that others need to repeat and judge a launch.
LAUNCH_FILES = (LAUNCH_CONFIG, LAUNCH_SCRIPT, STDOUT_LOG, STDERR_LOG, ENV_TEXT, SUMMARY)

# Files of a cell: one record, and a JSON-lines file of each of these kinds.
CELL_LOGS = ("requests", "metrics", "engine_step", "machine")
# Another kind with an emulated device.
DEVICE_LOG = "device"
ALL_LOGS = (*CELL_LOGS, DEVICE_LOG)


def cell_record(phase: str, cell: str) -> str:
    """Return the name of a cell's record file."""
    return f"cell_{phase}_{cell}.json"


def cell_log(kind: str, phase: str, cell: str) -> str:
    """Return the name of one of a cell's files; `kind` is one of ALL_LOGS."""
    return f"{kind}_{phase}_{cell}.jsonl"


def partial_cell(launch_folder: Path, cell: str) -> Path:
    """Return the folder in which a cell is written before it is complete and renamed."""
    return launch_folder / f"{cell}.partial"


def set_aside(path: Path, label: str) -> Path:
    """Return the first free name `<name>.<label><k>` beside a file or folder."""
    stem, suffix = (path.stem, path.suffix) if path.is_file() else (path.name, "")
    number = 1
    while (target := path.with_name(f"{stem}.{label}{number}{suffix}")).exists():
        number += 1
    return target
