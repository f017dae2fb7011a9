"""The driver's end of the process that watches the machine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from connector_tax.artifacts.study_records import QuietSection
from connector_tax.loadgen.affinity import AffinityPlan
from connector_tax.study.child import CommandChild
from connector_tax.study.machine_watch import WatchSettings

WATCH_MODULE = "connector_tax.study.machine_watch"


class MachineWatch(CommandChild):
    """The driver's end of the watching process; a context manager.

    Args:
        quiet: the `quiet` section of the configuration.
        plan: where load generator and server run.
        gpus: the UUIDs of the GPUs that the engine runs on; empty: on none.
    """

    def __init__(self, quiet: QuietSection, plan: AffinityPlan, gpus: Sequence[str]) -> None:
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

    def open(self, path: Path, server_group: int) -> None:
        """Begin to sample into a cell's file.

        Args:
            path: the file.
            server_group: the server's process group.
        """
        self.ask("open", path=str(path), server_group=server_group)

    def close(self) -> None:
        """End the cell's file."""
        self.ask("close")
