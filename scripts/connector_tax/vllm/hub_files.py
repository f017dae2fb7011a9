"""Fetch a model's files into the hub's cache, and print their commit.

Runs in the interpreter of vLLM's environment (study.fetch), which has huggingface_hub, and imports
nothing of this package. Arguments: model, revision (may be empty), and `dummy` if no weights are
needed. Prints one line of JSON.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path

# Weights in formats that vLLM ignores if there are safetensors.
OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]


def main(model: str, revision: str, load: str) -> None:
    """Fetch the files, unless the disk is too small for the missing ones."""
    hub = importlib.import_module("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")
    left_out = [*OTHER_WEIGHTS, *(["*.safetensors"] if load == "dummy" else [])]
    wanted = {"revision": revision or None, "ignore_patterns": left_out}
    if not constants.HF_HUB_OFFLINE:
        files = hub.snapshot_download(model, dry_run=True, **wanted)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        cache = Path(constants.HF_HUB_CACHE)
        there = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if missing > free:
            sys.exit(
                f"{missing / 2**30:.1f} GiB are to be fetched, but {free / 2**30:.1f} GiB are free "
                f"below {there}; set HF_HOME to another folder"
            )
    folder = Path(hub.snapshot_download(model, **wanted))
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(json.dumps({"commit": folder.name, "files": len(files), "bytes": size}))


if __name__ == "__main__":
    main(*sys.argv[1:])
