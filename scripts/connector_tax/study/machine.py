"""The driver's end of the process that watches the machine, and the rule while a cell runs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from connector_tax.analysis.quiet import (
    chunk_steal,
    chunk_value,
    judge_chunks,
    undisturbed,
)
from connector_tax.artifacts import paths
from connector_tax.artifacts.cell_records import MachineLine
from connector_tax.artifacts.launch_files import AttemptRecord, QuietLevel
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.record_reader import read_records
from connector_tax.artifacts.study_file import launches
from connector_tax.artifacts.study_records import QuietSection, StudyDocument
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.study.child import CommandChild
from connector_tax.study.machine_watch import WatchSettings
from connector_tax.study.server_command import affinity_plan
from connector_tax.study.yardstick import quiet_level

WATCH_MODULE = "connector_tax.study.machine_watch"


class MachineWatch(CommandChild):
    """The driver's end of the watching process; a context manager.

    Args:
        quiet: the `quiet` section of the configuration.
        plan: where load generator and server run.
        gpus: the UUIDs of the GPUs that the engine runs on; empty: on none.
    """

    def __init__(self, quiet: QuietSection, plan: AffinityPlan, gpus: Sequence[str]) -> None:
        self.quiet = quiet
        loadgen = {*plan.loadgen, *(cpu for cpus in plan.workers for cpu in cpus)}
        settings: WatchSettings = {
            "interval_ms": quiet["interval_ms"],
            "working_set_mib": quiet["working_set_mib"],
            "elements": quiet["elements"],
            "chunk_ms": quiet["chunk_ms"],
            "loadgen": sorted(loadgen),
            "server": sorted(plan.server),
            "home": sorted(plan.loadgen) if plan.enabled else [],
            "driver": os.getpid(),
            "gpus": list(gpus),
        }
        super().__init__(WATCH_MODULE, [json.dumps(settings)])

    def open(self, path: Path, server_group: int, slow_ns: float | None) -> None:
        """Look at the server's CPUs, then sample into a cell's file.

        Args:
            path: the file.
            server_group: the server's process group.
            slow_ns: time of a load above which a look is taken again (`machine_watch.LOOKS`); None:
                never.
        """
        self.ask("open", path=str(path), server_group=server_group, slow_ns=slow_ns)

    def recent(self) -> list[MachineLine]:
        """The lines written since the last call, from the cell's `begin` on."""
        lines: list[MachineLine] = self.ask("recent")["lines"]
        return lines

    def close(self) -> None:
        """End the cell's file, with another look at the server's CPUs."""
        self.ask("close")


def block_quiet_level(
    study: StudyDocument, study_folder: Path, launch: Launch
) -> QuietLevel | None:
    """The quiet level of a block and a phase: one for all their launches, which are compared.

    Taken before the first of their servers is started, on the device that they have; whoever comes
    later finds it in that launch's attempts.json.

    Args:
        study: the content of study.json; within its slot where it names slots.
        study_folder: results/<study>.
        launch: one of them.

    Returns:
        As `yardstick.quiet_level`; None in a study without a `quiet` section.
    """
    quiet = study["config"].get("quiet")
    if quiet is None:
        return None
    for other in launches(study, launch.phase):
        path = other.folder(study_folder) / paths.ATTEMPTS
        if other.block == launch.block and path.exists():
            for attempt in read_records(path, AttemptRecord):
                level = attempt.get("quiet_level")
                if level is not None:
                    return level
    cpus = affinity_plan(study).server
    return quiet_level(quiet["working_set_mib"], quiet["elements"], cpus, quiet["level_looks"])


def live_rule(watch: MachineWatch | None) -> "LiveRule | None":
    """A fresh rule for one cell; None where no success is left out."""
    if watch is None or watch.quiet["max_factor"] is watch.quiet["max_chunk_steal"] is None:
        return None
    return LiveRule(watch)


class LiveRule:
    """Says of the successes of a running cell which of them lived in quiet time, as far as known.

    A success whose last chunk is not over yet does not count yet. `analysis.quiet` judges the same
    chunks again when the cell is over, and its word is final: the level may still have moved.
    """

    def __init__(self, watch: MachineWatch) -> None:
        self._watch = watch
        self._cpus: list[int] = []
        self._last: MachineLine
        self._edges_ns: list[int] = []
        self._values_ns: list[float] = []
        self._steal: list[float] = []

    def __call__(self, spans: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each of the spans (ns from, to) lies in quiet time."""
        quiet = self._watch.quiet
        for line in self._watch.recent():
            if line["kind"] == "begin":
                self._cpus = [len(line["loadgen"]), len(line["server"])]
            else:
                self._values_ns.append(chunk_value(line["memory_ns"], quiet["chunk_percentile"]))
                self._steal.append(chunk_steal(self._last, line, self._cpus))
            self._edges_ns.append(line["t_ns"])
            self._last = line
        edges = np.array(self._edges_ns, np.int64)
        chunks = judge_chunks(edges, np.array(self._values_ns), np.array(self._steal), quiet)
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
        return [bool(quiet) for quiet in undisturbed(chunks, starts, ends)]
