"""Install and remove the step probe, as an overlay folder on the server's PYTHONPATH.

The overlay holds copies of step_probe/, device_time/ and settings_probe.py, and the metadata by
which vLLM finds them as plugins; every file carries the CONNECTOR_TAX_PATCH marker. Installing
writes the folder and removing deletes it; both can be repeated. No file of the environment changes,
as the hash over the installed vLLM's sources proves.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from connector_tax.artifacts.launch_files import EngineFiles
from connector_tax.artifacts.stage_records import VllmDescription
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.config import ROOT, pythons_of
from connector_tax.files import fsync, read_json, sha256_file, sha256_tree, write_json, write_text
from connector_tax.vllm.tiny_model import TINY, write_model

MARKER = "CONNECTOR_TAX_PATCH"
PROBE = "connector_tax_step_probe"
DEVICE_TIME = "connector_tax_device_time"
SETTINGS_PROBE = "connector_tax_settings_probe"
_ROOM = Path(__file__).parent
_VERSION = "1.0"
_EMPTY: Mapping[str, str] = MappingProxyType({})
# Environment of the engine that tests a step of the emulated device: one process, no network.
_PROOF = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
_PACKAGE = """
import json
from importlib.util import find_spec
print(json.dumps(find_spec("vllm").submodule_search_locations[0]))
"""
_FILES = {
    **{
        f"{package}/{path.name}": path.read_text(encoding="utf-8")
        for package, folder in ((PROBE, "step_probe"), (DEVICE_TIME, "device_time"))
        for path in sorted((_ROOM / folder).glob("*.py"))
    },
    f"{SETTINGS_PROBE}.py": (_ROOM / "settings_probe.py").read_text(encoding="utf-8"),
    f"{PROBE}-{_VERSION}.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: connector-tax-step-probe\n"
        f"Version: {_VERSION}\nSummary: {MARKER}\n"
    ),
    f"{PROBE}-{_VERSION}.dist-info/entry_points.txt": (
        f"# {MARKER}\n[vllm.general_plugins]\n{PROBE} = {PROBE}:register\n"
        f"{SETTINGS_PROBE} = {SETTINGS_PROBE}:register\n"
        f"{DEVICE_TIME} = {DEVICE_TIME}:register\n"
    ),
}


class OverlayError(Exception):
    """The overlay cannot be installed or removed; the text gives the cause."""


def install(folder: Path) -> dict[str, str]:
    """Write the overlay to `folder`; return SHA-256 by file name.

    An existing overlay is updated to this version's content.

    Raises:
        OverlayError: the folder holds a file that is not the probe's.
    """
    _refuse_strangers(folder)
    for path in _files_of(folder):
        if str(path.relative_to(folder)) not in _FILES:
            path.unlink(missing_ok=True)
    for name, text in _FILES.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    return {name: sha256_file(folder / name) for name in _FILES}


def remove(folder: Path) -> list[str]:
    """Delete the overlay; return the names of its files.

    Raises:
        OverlayError: the folder holds a file that is not the probe's; nothing is deleted.
    """
    if not folder.exists():
        return []
    _refuse_strangers(folder)
    names = sorted(str(p.relative_to(folder)) for p in _files_of(folder))
    shutil.rmtree(folder)
    fsync(folder.parent)
    return names


def _files_of(folder: Path) -> list[Path]:
    """Return the folder's files, except temporary files that another process is about to rename."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp"]
    return [p for p in files if "__pycache__" not in p.parts]


def _refuse_strangers(folder: Path) -> None:
    for path in _files_of(folder):
        if MARKER not in path.read_text(encoding="utf-8", errors="replace"):
            raise OverlayError(
                f"{path}: not the step probe's (no {MARKER} marker in it); move it away, this "
                "folder is written and deleted as a whole"
            )


def describe_vllm(python: Path) -> VllmDescription:
    """Return the hook points of `python`'s vLLM, by running step_probe/hook_points.py.

    Raises:
        OverlayError: the interpreter is missing, or vLLM cannot be imported; quotes its output's
            end.
    """
    described: VllmDescription = _json_of(python, str(_ROOM / "step_probe" / "hook_points.py"))
    return described


def refuse_unfit_for_device_time(python: Path, device: Mapping[str, Any]) -> None:
    """Check that a device can be emulated for `python`'s vLLM: by its names, then by one step.

    Args:
        device: coefficients of the emulated device, as in a launch's device_time.json.

    Raises:
        OverlayError: names what that vLLM lacks, or why it cannot be examined or serves no request.
    """
    model = read_json(TINY)
    with tempfile.TemporaryDirectory(prefix="overlay-") as name:
        folder = Path(name)
        install(folder / "overlay")
        write_model(folder / "model", model)
        architecture = model["architectures"][0]
        write_json(folder / "device_time.json", {**device, "architecture": architecture})
        missing = _json_of(
            python, "-m", f"{DEVICE_TIME}.patches", str(folder / "model"),
            environment={
                **_PROOF,
                "PYTHONPATH": str(folder / "overlay"),
                "CONNECTOR_TAX_DEVICE_TIME": str(folder / "device_time.json"),
                "AGENTIC_STEP_LOG_PATH": str(folder / "engine_step"),
            },
        )  # fmt: skip
    if missing:
        raise OverlayError(
            f"{python}: no device can be emulated for this vLLM, which lacks {'; '.join(missing)}"
        )


def _json_of(python: Path, *program: str, environment: Mapping[str, str] = _EMPTY) -> Any:
    """Run a program with the interpreter `python`; return the JSON that it prints last."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    try:
        done = subprocess.run(
            [python, *program],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **variables},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OverlayError(f"{python}: cannot be run: {error}") from error
    if done.returncode != 0:
        raise OverlayError(f"{python}: vLLM cannot be examined:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def sources_sha256(package: Path) -> str:
    """Return one digest over the names and contents of all sources of an installed package."""
    return sha256_tree(package, "*.py")


def engine_files(engine: EngineSection) -> dict[str, EngineFiles]:
    """Return `lock_sha256` and `sources_sha256` of each interpreter of the study.

    The lock is None if the environment was not built from one of this project's; the sources are
    None without vLLM. An embedded engine has no separate interpreter. Reading all sources takes
    about a second.

    Args:
        engine: the `engine` section of a study's configuration.
    """
    return {
        python: {"lock_sha256": _lock(ROOT / python), "sources_sha256": _sources(ROOT / python)}
        for python in pythons_of(engine)
    }


def _lock(python: Path) -> str | None:
    stamp = python.parents[1] / "built.json"
    return str(read_json(stamp)["lock_sha256"]) if stamp.exists() else None


def _sources(python: Path) -> str | None:
    try:
        return sources_sha256(Path(_json_of(python, "-c", _PACKAGE)))
    except OverlayError:
        return None


def leftovers(package: Path) -> list[str]:
    """Return files of the package's environment that carry the marker; there must be none."""
    site = package.parent
    candidates = {*site.glob("*.pth"), *site.glob("connector_tax_*_probe*"), *package.rglob("*.py")}
    return sorted(
        str(path.relative_to(site))
        for path in candidates
        if path.is_dir() or MARKER in path.read_text(encoding="utf-8", errors="replace")
    )
