"""The study folder as the audit reads it: every planned launch and cell with its raw records."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from connector_tax.artifacts import paths
from connector_tax.artifacts.index import LaunchIndex, cell_state, read_index
from connector_tax.artifacts.launch_files import ClaimedNode
from connector_tax.artifacts.names import (
    PHASES,
    Launch,
    baseline_of,
    configuration_of,
    launched_plains,
)
from connector_tax.artifacts.study_file import read_study
from connector_tax.artifacts.study_records import CellPlan
from connector_tax.files import ArtifactError, read_json, read_jsonl, sha256_file
from connector_tax.provenance.recompute import Row

# How a request that was sent may fail.
FAILED = ("error", "timeout", "cancelled")
COUNTERS = {
    "success": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "external_prefix_cache_hits": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def series(values: Mapping[str, float], name: str) -> float | None:
    """A metric of a scrape, its label sets summed; None where it is absent."""
    known = [value for key, value in values.items() if key.split("{")[0] == name]
    return sum(known) if known else None


@dataclass(frozen=True)
class RawLaunch:
    """One planned launch: its folder and, where there is one, its index.json."""

    config: str
    block: int
    phase: str
    folder: Path
    index: LaunchIndex | None

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
        return "missing" if self.index is None else self.index.status


class RawCell:
    """One planned cell of a launch, its records read when first asked for."""

    def __init__(self, launch: RawLaunch, planned: CellPlan) -> None:
        self.launch = launch
        self.planned = planned
        self.cell = str(planned["cell"])
        self.key = (launch.config, launch.block, launch.phase, self.cell)
        self.name = f"{launch.name}/{self.cell}"
        self.folder = launch.folder / self.cell
        self.entry = None if launch.index is None else launch.index.entry(self.cell)
        self.status, self.reason = cell_state(launch.index, self.entry)

    @property
    def measured(self) -> bool:
        """Whether there are records: a valid or a void cell."""
        return self.status in ("valid", "void")

    def path(self, kind: str) -> Path:
        """The cell's `requests`, `metrics`, `engine_step`, `machine` or `cell` file."""
        place = (self.launch.phase, self.cell)
        name = paths.cell_record(*place) if kind == "cell" else paths.cell_log(kind, *place)
        return self.folder / name

    @cached_property
    def record(self) -> Row:
        """The cell file."""
        record: Row = read_json(self.path("cell"))
        return record

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

    @property
    def in_window(self) -> list[Row]:
        """The requests that were due in the measured window."""
        start, stop = (self.record["window"][f"t_{name}_ns"] for name in ("warmup_end", "stop"))
        return [r for r in self.requests if start <= r["t_intended_ns"] < stop]

    @property
    def counter_growth(self) -> dict[str, float | None]:
        """How much the server's counters grew over the cell; None where one is absent."""
        first, last = self.metrics[0]["values"], self.metrics[-1]["values"]
        growth: dict[str, float | None] = {}
        for key, name in COUNTERS.items():
            before, after = series(first, name), series(last, name)
            growth[key] = None if before is None or after is None else after - before
        return growth

    def steps(self) -> list[Row]:
        """The lines of the step log; read anew each time, since they are many."""
        return list(read_jsonl(self.path("engine_step")))


def _device(node: ClaimedNode) -> str:
    """Machine and GPUs; without GPUs the name of the device and the CPUs."""
    cpus = "" if node["gpus"] else f", CPUs {node['cpus']}"
    return f"{node['machine']} {' '.join(node['devices'])}{cpus}"


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
        self.document = read_study(study_file)
        try:
            self.config = self.document["config"]
            entries = {entry["id"]: entry for entry in self.document["configurations"]}
            self.ids = list(entries)
            self.baseline = baseline_of(self.config)
            # Without a connector there are no callbacks, and they take no time.
            self.bare_baseline = entries[self.baseline].get("connector") is None
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
        """The launch names of a phase, further launches of the baseline at the end."""
        there = {entry["config"] for entry in self.document["run_order"][phase]}
        return [c for c in dict.fromkeys((*self.ids, *self.plains(phase))) if c in there]

    def plains(self, phase: str) -> list[str]:
        """The launch names of the baseline in a phase, in the order of their numbers."""
        launched = (e["config"] for e in self.document["run_order"][phase])
        return launched_plains(launched, self.baseline)

    def aa_launch(self, phase: str) -> list[str]:
        """The last launch of the baseline, which is compared with the others; empty if alone."""
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
        rates: Row = read_json(self.root / paths.REFERENCE_RATES)
        return rates

    @cached_property
    def shape_rates(self) -> Row:
        """shape_rates.json as published; its `shapes` are empty in a study that has none."""
        if self.config.get("shape_rates") is None:
            return {"shapes": {}}
        rates: Row = read_json(self.root / paths.SHAPE_RATES)
        return rates

    def offered_rps(self, phase: str, planned: CellPlan) -> float:
        """The rate of a cell: its own, or the reference rate, or less where its shape allows less.

        By the study's own files; that these are right is claimed elsewhere.
        """
        if planned["rate_rps"] is not None:
            return float(planned["rate_rps"])
        rate = float(self.rates["ref_safe" if phase == "B" else "ref_load"])
        shape = self.shape_rates["shapes"].get(planned["cell"])
        return rate if shape is None else min(rate, float(shape["most_rps"]))

    @cached_property
    def devices(self) -> dict[int, str]:
        """Block to the name of the device it ran on; empty where all ran on one, or none is known.

        That all launches of a block ran there is claimed elsewhere.
        """
        names: dict[int, str] = {}
        for launch in self.launches:
            for attempt in () if launch.index is None else launch.index.attempts:
                if "node" in attempt:
                    names.setdefault(launch.block, _device(attempt["node"]))
        unknown = "a device that was not recorded"
        everywhere = {block: names.get(block, unknown) for block in range(self.document["blocks"])}
        return everywhere if len(set(names.values())) > 1 else {}

    @cached_property
    def step_timing(self) -> bool:
        """Whether the patch stage says that steps were timed."""
        status = read_json(self.root / paths.PATCH_STATUS)
        return bool(status["step_timing_available"])

    def _launches(self) -> Iterator[RawLaunch]:
        for phase in PHASES:
            for config in self.configs(phase):
                for entry in self.document["run_order"][phase]:
                    if entry["config"] == config:
                        folder = Launch(config, entry["block"], phase).folder(self.root)
                        yield RawLaunch(config, entry["block"], phase, folder, read_index(folder))
