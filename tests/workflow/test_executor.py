"""An executor that copies back what Snakemake knows would lose the raw records: it is refused."""

import os
import subprocess
from pathlib import Path

from tests.workflow.harness import command, environment, prepare

# The least that Snakemake takes for an executor, here one that transfers files.
PLUGIN = """
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=True,
    job_deploy_sources=False,
    can_transfer_local_files=True,
)

class Executor(RemoteExecutor):
    def run_job(self, job):
        raise AssertionError("a job was started")

    async def check_active_jobs(self, active_jobs):
        raise AssertionError("a job was started")
        yield

    def cancel_jobs(self, active_jobs):
        pass
"""


def test_an_executor_without_a_shared_file_system_is_refused(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "study")
    plugin = tmp_path / "plugins" / "snakemake_executor_plugin_elsewhere"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command(folder, "all", options=("--executor", "elsewhere", "--jobs", "2")),
        env={**environment(folder), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "--executor: found one without a shared file system; allowed: local" in said, said
    assert not (folder / "results").exists()
