"""The study folder as the audit reads it: every planned launch and cell with its raw records."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from connector_tax.artifacts.names import PHASES, configuration_of, launched_plains
from connector_tax.artifacts.study_file import read_study
from connector_tax.files import ArtifactError, read_json, read_jsonl, sha256_file
from connector_tax.provenance.recompute import Row


@dataclass(frozen=True)
class RawLaunch:
    """One planned launch: its folder and, where there is one, its index.json."""

    config: str
    block: int
    phase: str
    folder: Path
    index: Row | None

    @property
    def name(self) -> str:
        """`plain/block0/A`."""
        return f"{self.config}/block{self.block}/{self.phase}"

    @property
    def configuration(self) -> str:
        """The configuration it was started with."""
        return configuration_of(self.config)

    @property
    def status(self) -> str:
        """done, skipped or failed; missing without an index.json."""
        return "missing" if self.index is None else str(self.index["status"])


class RawCell:
    """One planned cell of a launch, its records read when first asked for."""

    def __init__(self, launch: RawLaunch, planned: Mapping[str, Any]) -> None:
        self.launch = launch
        self.planned = planned
        self.cell = str(planned["cell"])
        self.key = (launch.config, launch.block, launch.phase, self.cell)
        self.name = f"{launch.name}/{self.cell}"
        self.folder = launch.folder / self.cell
        self._suffix = f"{launch.phase}_{self.cell}"
        entries = [] if launch.index is None else launch.index["cells"]
        self.entry: Row | None = next((e for e in entries if e["cell"] == self.cell), None)

    @cached_property
    def status(self) -> str:
        """valid, void, skipped, missing, or failed when the whole launch failed."""
        if self.entry is None:
            return "missing" if self.launch.status == "done" else self.launch.status
        if self.entry["status"] == "missing" and self.launch.status == "failed":
            return "failed"
        return str(self.entry["status"])

    @cached_property
    def reason(self) -> str | None:
        """Why the cell has no number; None for a valid one."""
        if self.status == "valid":
            return None
        of_launch = None if self.launch.index is None else self.launch.index["reason"]
        if self.launch.index is None:
            return "the launch has no index.json"
        if self.entry is None:
            return of_launch or "the launch's index.json does not list the cell"
        return self.entry["reason"] or of_launch or "no reason was recorded"

    @property
    def measured(self) -> bool:
        """Whether there are records: a valid or a void cell."""
        return self.status in ("valid", "void")

    def path(self, kind: str) -> Path:
        """The cell's `requests`, `metrics`, `engine_step`, `machine` or `cell` file."""
        return self.folder / f"{kind}_{self._suffix}.{'json' if kind == 'cell' else 'jsonl'}"

    @cached_property
    def record(self) -> Row:
        """The cell file."""
        found: Row = read_json(self.path("cell"))
        return found

    @cached_property
    def requests(self) -> list[Row]:
        """The lines of the requests file."""
        return list(read_jsonl(self.path("requests")))

    @cached_property
    def metrics(self) -> list[Row]:
        """The lines of the metrics file."""
        return list(read_jsonl(self.path("metrics")))

    @cached_property
    def machine(self) -> list[Row]:
        """The lines of the machine file."""
        return list(read_jsonl(self.path("machine")))

    def steps(self) -> list[Row]:
        """The lines of the step log; read anew each time, since they are many."""
        return list(read_jsonl(self.path("engine_step")))


class RawStudy:
    """study.json and every planned launch and cell, in the study's order.

    Args:
        study_file: results/<study>/study.json.
        published: where the published analysis/ and figures/ lie; None: beside study.json.

    Raises:
        ArtifactError: study.json or an index.json is missing a key or does not parse.
    """

    def __init__(self, study_file: Path, published: Path | None = None) -> None:
        self.root = study_file.parent
        self.published = published or self.root
        self.as_sealed: Row = read_json(study_file)
        self.document: Row = read_study(study_file)
        try:
            self.config: Row = self.document["config"]
            self.ids = [entry["id"] for entry in self.document["configurations"]]
            self.launches = list(self._launches())
            self.cells = [
                RawCell(launch, planned)
                for launch in self.launches
                for planned in self.document["cells"][launch.phase]
            ]
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{study_file} or an index.json: malformed: {error!r}") from None
        self._hashes: dict[Path, str] = {}

    @property
    def older_form(self) -> bool:
        """Measured before `plain_launches` existed: published by an older method."""
        return "closing_plain" in self.as_sealed["config"]

    @property
    def numbers(self) -> Path:
        """Where the tables and figures to be recomputed lie.

        Those an archive was published with, or, where these are of an older method, those a replot
        made again.
        """
        return self.root if self.older_form else self.published

    def configs(self, phase: str) -> list[str]:
        """The launch names of a phase, further launches of plain at the end."""
        there = {entry["config"] for entry in self.document["run_order"][phase]}
        return [c for c in dict.fromkeys((*self.ids, *self.plains(phase))) if c in there]

    def plains(self, phase: str) -> list[str]:
        """The launch names of plain in a phase, in the order of their numbers."""
        return launched_plains(e["config"] for e in self.document["run_order"][phase])

    def aa_launch(self, phase: str) -> list[str]:
        """The last launch of plain, which is compared with the others; empty if alone."""
        return self.plains(phase)[1:][-1:]

    def reference_names(self) -> list[str]:
        """The names reference_rates.json has: an older study's are those of its launches."""
        return self.configs("A") if self.older_form else self.ids

    def reference_name(self, launch: str) -> str:
        """Under which of them a launch is counted."""
        return launch if self.older_form else configuration_of(launch)

    def sha256(self, path: Path) -> str:
        """A file's hash, computed once."""
        if path not in self._hashes:
            self._hashes[path] = sha256_file(path)
        return self._hashes[path]

    @cached_property
    def rates(self) -> Row:
        """reference_rates.json as published."""
        found: Row = read_json(self.root / "reference_rates.json")
        return found

    @cached_property
    def step_timing(self) -> bool:
        """Whether the patch stage says that steps were timed."""
        status = read_json(self.root / "patch" / "patch_status.json")
        return bool(status["step_timing_available"])

    def _launches(self) -> Iterator[RawLaunch]:
        for phase in PHASES:
            for config in self.configs(phase):
                for entry in self.document["run_order"][phase]:
                    if entry["config"] == config:
                        block = entry["block"]
                        folder = self.root / "runs" / config / f"block{block}" / phase
                        path = folder / "index.json"
                        index = read_json(path) if path.exists() else None
                        yield RawLaunch(config, block, phase, folder, index)
