"""study.json as its readers take it, and the names of the launches of a block.

A block holds each configuration once, under its id, and plain `plain_launches` times, under the
names `plain`, `plain_2`, `plain_3` and so on.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from connector_tax.files import ArtifactError, read_json

PLAIN = "plain"
METRICS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p90")
REFERENCES = ("ref_safe", "ref_load")
# `plain_last` in studies measured before `plain_launches` existed.
_FURTHER_PLAIN = re.compile(rf"{PLAIN}_(\d+|last)")


def plain_names(launches: int) -> list[str]:
    """The names of plain's launches in a block."""
    return [PLAIN, *(f"{PLAIN}_{number}" for number in range(2, launches + 1))]


def configuration_of(name: str) -> str:
    """The configuration a launch is started with; no configuration's id is like `plain_2`."""
    return PLAIN if _FURTHER_PLAIN.fullmatch(name) else name


def launched_plains(names: Iterable[str]) -> list[str]:
    """The launches of plain among launch names, each once, in the order of their numbers."""
    plains = {name for name in names if configuration_of(name) == PLAIN}
    return sorted(plains, key=lambda name: (len(name), name))


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


def _present_form(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in config.items() if key != "closing_plain"}
    settings["plain_launches"] = 2 if config["closing_plain"] else 1
    statistics = dict(config["statistics"])
    margin = statistics.pop("margin")
    statistics["margins"] = dict.fromkeys(METRICS, margin)
    statistics["confirmatory"] = list(REFERENCES)
    return {**settings, "statistics": statistics}
