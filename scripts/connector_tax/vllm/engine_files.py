"""Which files a launch's vLLM is made of: the lock its environment was built from, its sources."""

from pathlib import Path

from connector_tax.artifacts.launch_files import EngineFiles
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.config import ROOT, pythons_of
from connector_tax.files import read_json
from connector_tax.vllm.overlay import OverlayError, package_of, sources_sha256


def engine_files(engine: EngineSection) -> dict[str, EngineFiles]:
    """By interpreter, as the study names it: `lock_sha256` and `sources_sha256`.

    The lock is None where the environment was not built from one of this project's, the sources
    where there is no vLLM. An embedded engine has no interpreter of its own. Reads every source,
    which takes a second or so.

    Args:
        engine: the `engine` section of a study's configuration.
    """
    if "python" not in engine:
        return {}
    return {
        python: {"lock_sha256": _lock(ROOT / python), "sources_sha256": _sources(ROOT / python)}
        for python in pythons_of(engine)
    }


def _lock(python: Path) -> str | None:
    stamp = python.parents[1] / "built.json"
    return str(read_json(stamp)["lock_sha256"]) if stamp.exists() else None


def _sources(python: Path) -> str | None:
    try:
        return sources_sha256(package_of(python))
    except OverlayError:
        return None
