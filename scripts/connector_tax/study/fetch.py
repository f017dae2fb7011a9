"""Fetch the model of a study before any launch, so that no start-up waits for a network.

Servers then read only the cache (`HF_HUB_OFFLINE`), so that every launch loads the same files. The
commit is recorded in model.json and environment.json.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from connector_tax.artifacts import paths
from connector_tax.artifacts.stage_records import ModelRecord
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import EngineSection
from connector_tax.commands import run_command, study_parser
from connector_tax.config import ROOT, is_fetched
from connector_tax.files import ArtifactError, write_json
from connector_tax.study.guard import end_with_parent
from connector_tax.vllm import hub_files


class FetchError(Exception):
    """The model cannot be fetched; the text says why."""


def fetch(engine: EngineSection) -> ModelRecord:
    """Fetch the model of an `engine` section; return the content of model.json.

    Raises:
        FetchError: the hub lacks the model or cannot be reached, or the disk is too small.
    """
    model, revision = engine["model"], engine.get("revision", "")
    load = str(engine["flags"].get("--load-format", "auto"))
    began = time.monotonic()
    command = [str(ROOT / engine["python"]), str(Path(hub_files.__file__)), model, revision, load]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        fetched: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError) as error:
        name = f"{model}@{revision}" if revision else model
        raise FetchError(f"engine.model: {name} was not fetched: {error}") from None
    return {
        "model": model,
        "revision": revision or None,
        "commit": fetched["commit"],
        "files": fetched["files"],
        "bytes": fetched["bytes"],
        "seconds": round(time.monotonic() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the model of a study and write model.json."""
    parser = study_parser("study.fetch", main.__doc__)
    return run_command(parser, argv, _write, (ArtifactError, FetchError), label="fetch: ")


def _write(arguments: argparse.Namespace) -> None:
    end_with_parent(print)
    engine = read_study(arguments.study)["config"]["engine"]
    if not is_fetched(engine):
        raise FetchError(f"engine.model: {engine['model']} is a folder; there is nothing to fetch")
    content = fetch(engine)
    write_json(arguments.study.parent / paths.MODEL, content)
    gib = content["bytes"] / 2**30
    print(f"{content['model']}, commit {content['commit']}: {gib:.1f} GiB")


if __name__ == "__main__":
    sys.exit(main())
