"""study.json as its readers take it: an older study's in the present form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connector_tax.artifacts.names import METRICS, REFERENCES, Launch
from connector_tax.files import ArtifactError, read_json


def read_study(path: Path) -> dict[str, Any]:
    """The content of study.json in the present form.

    A study measured before `plain_launches` existed launched plain first in each block and, with
    `closing_plain`, a second time last, under the name `plain_last`; its one margin held for every
    metric, and its confirmatory family had no key.

    Raises:
        ArtifactError: the file is missing or holds no JSON object.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise ArtifactError(f"{path}: found {type(document).__name__}; allowed: an object")
    config = document.get("config")
    if isinstance(config, dict) and "closing_plain" in config:
        document["config"] = _present_form(config)
    return document


def launches(study: Mapping[str, Any], phase: str) -> list[Launch]:
    """The launches of a phase in run order."""
    return [Launch(e["config"], e["block"], phase) for e in study["run_order"][phase]]


def _present_form(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in config.items() if key != "closing_plain"}
    settings["plain_launches"] = 2 if config["closing_plain"] else 1
    statistics = dict(config["statistics"])
    margin = statistics.pop("margin")
    statistics["margins"] = dict.fromkeys(METRICS, margin)
    statistics["confirmatory"] = list(REFERENCES)
    return {**settings, "statistics": statistics}
