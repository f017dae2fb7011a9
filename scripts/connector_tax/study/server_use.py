"""The two records of a server launch besides its cells: resources.json and settings.json."""

import os

from connector_tax.artifacts import paths
from connector_tax.artifacts.launch_files import AttemptRecord, ServerResources
from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import write_json
from connector_tax.study.engine_settings import engine_record, remove_settings
from connector_tax.study.processes import ServerProcesses
from connector_tax.study.resources import idle_cpu, snapshot
from connector_tax.study.server import Server


class ServerUse:
    """What one server launch takes and what it made of its configuration.

    Args:
        attempt: the driver's record of this server launch, with `attempt` and `startup_s`.
    """

    def __init__(
        self, study: StudyDocument, launch: Launch, server: Server, attempt: AttemptRecord
    ) -> None:
        self.processes = ServerProcesses(server.pid, server.companion_pids())
        self._server = server
        self._engine = study["config"]["engine"]
        self._device = self._engine.get("device", "cpu")
        self._idle_s = study["config"]["resources"]["idle_s"]
        self._of_launch = {"launch": launch.name, "attempt": attempt["attempt"]}
        self._startup_s = attempt["startup_s"]

    def before_load(self) -> None:
        """Record the server as it is ready and has had nothing to do yet."""
        idle = idle_cpu(self.processes, self._idle_s, self._server.check_alive)
        self._write(
            {
                "idle_cpu": idle,
                "before_load": snapshot(self.processes, self._device),
                "after_load": None,
                "after_load_reason": "the launch ended before its last cell",
            }
        )
        page = self._server.get("/metrics")
        settings = engine_record(self._server, self._engine, os.environ, page)
        write_json(self._server.folder / paths.SETTINGS, self._of_launch | settings)
        remove_settings(self._server.folder)

    def after_load(self) -> None:
        """Record the server once more, drained after its last cell."""
        self._write(
            self._resources
            | {"after_load": snapshot(self.processes, self._device), "after_load_reason": None}
        )

    def _write(self, resources: ServerResources) -> None:
        self._resources = resources
        content = self._of_launch | {"startup_s": self._startup_s} | resources
        write_json(self._server.folder / paths.RESOURCES, content)
