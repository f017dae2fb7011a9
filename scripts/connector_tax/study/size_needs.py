"""What a study takes of memory and disk beside its artifacts: weights, LMCache's buffer, bodies."""

import os
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ROOT, ConfigError, is_fetched, shipped
from connector_tax.files import read_json
from connector_tax.model_size import read_model
from connector_tax.servers.kinds import engine_of

# Buffer of one launch: of each rank where no LMCACHE_MAX_LOCAL_CPU_SIZE is set, LMCache's default;
# of the server beside an LMCacheMPConnector (vllm.launch).
LMCACHE_GIB = {"LMCacheConnectorV1": 5.0, "LMCacheMPConnector": 1.0}
GIB = 2**30


def weights_gib(study: StudyDocument, folder: Path) -> float | None:
    """The model's weights: as fetched, else by its config.json; None where neither tells.

    Args:
        study: a resolved design.
        folder: results/<study>.
    """
    config = study["config"]
    engine = config["engine"]
    if not engine_of(engine).configured:
        return 0.0
    if (folder / paths.MODEL).exists():
        return float(read_json(folder / paths.MODEL)["bytes"]) / GIB
    named = (config.get("rehearsal") or {}).get("model_config")
    if not is_fetched(engine):
        file = ROOT / engine["model"] / "config.json"
    elif named is not None:
        file = shipped(named)
    else:
        return None
    try:
        model = read_model(file)
    except ConfigError:
        return None  # not there, or of another kind: it may be served all the same
    return model.parameters * model.weight_bytes / GIB


def lmcache_gib(study: StudyDocument) -> float:
    """Host memory that LMCache reserves in a launch, the largest of the study's; 0 without it."""
    engine = study["config"]["engine"]
    if not engine_of(engine).configured:
        return 0.0
    sizes = [0.0]
    for entry in study["configurations"]:
        form = engine["forms"].get(entry["id"], {})
        connector = form.get("connector", entry["connector"])
        if connector not in LMCACHE_GIB:
            continue
        size, ranks = LMCACHE_GIB[connector], 1
        if connector == "LMCacheConnectorV1":
            environment = {**engine["environment"], **form.get("environment", {})}
            size = float(environment.get("LMCACHE_MAX_LOCAL_CPU_SIZE") or size)
            ranks = int(engine["flags"].get("--tensor-parallel-size", 1))
        sizes.append(size * ranks)
    return max(sizes)


def bodies_gib(study: StudyDocument) -> float:
    """Bodies of the longest prompts: as many as may be in flight, and as many made ahead."""
    cap = study["config"]["cell"]["inflight_cap"]
    longest = max(cell["input_tokens"] for cells in study["cells"].values() for cell in cells)
    # A token is at most the digits of the largest id, and a comma.
    digits = len(str(engine_of(study["config"]["engine"]).served["vocab_size"]))
    return float(2 * cap * longest * (digits + 1)) / GIB


def model_cache() -> Path:
    """Where the hub's files come to lie, or the nearest folder above it that is there."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{caches}/huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser().absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
