"""An executor that would lose raw records is refused, and slots of one machine with any."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.workflow.harness import command, ended, prepare

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


def elsewhere(
    tmp_path: Path, edit: Callable[[str], str] = str, *, shared: bool
) -> tuple[Path, str]:
    """A study's folder, and what Snakemake said when it was to run there with that executor."""
    folder = prepare(tmp_path / "study", edit)
    plugin = tmp_path / "plugins" / "snakemake_executor_plugin_elsewhere"
    plugin.mkdir(parents=True)
    text = PLUGIN.replace("implies_no_shared_fs=True", f"implies_no_shared_fs={not shared}")
    (plugin / "__init__.py").write_text(text)
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    options = ("--executor", "elsewhere", "--jobs", "2")
    done = ended(command(folder, "all", options=options), folder, PYTHONPATH=path)
    assert done.returncode != 0
    return folder, done.stdout + done.stderr


def test_an_executor_without_a_shared_file_system_is_refused(tmp_path: Path) -> None:
    folder, said = elsewhere(tmp_path, shared=False)
    assert "--executor: found one without a shared file system; allowed: local" in said, said
    assert not (folder / "results").exists()


def test_slots_are_of_one_machine_and_refused_with_an_executor(tmp_path: Path) -> None:
    def edit(text: str) -> str:
        return f"{text}devices: [{{id: a, cpus: '0'}}]\n"

    folder, said = elsewhere(tmp_path, edit, shared=True)
    assert "devices: found a with --executor; allowed: no such section" in said, said
    assert not (folder / "results").exists()
