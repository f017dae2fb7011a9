"""Test users without home, name, CPUs or disk space: a launch works or names the problem."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.study.driving import arguments, as_user, drive, index_of, write_study

pytestmark = pytest.mark.workflow

UNKNOWN_UID = 54321


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user may pass, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_user_without_passwd_entry_and_home_measures_on_one_cpu(open_folder: Path) -> None:
    study_file = write_study(open_folder / "results" / "tiny")
    for path in [open_folder, *open_folder.rglob("*")]:
        os.chown(path, UNKNOWN_UID, UNKNOWN_UID)
    one = str(min(os.sched_getaffinity(0)))
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "USER")}
    done = subprocess.run(
        [*as_user(UNKNOWN_UID), "taskset", "-c", one, sys.executable, "-m",
         "connector_tax.study.launch", *arguments(study_file)],
        umask=0o077,
        cwd=open_folder,
        env={**kept, "TMPDIR": str(open_folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = index_of(study_file)
    assert index["status"] == "done", index["reason"]
    (warning,) = index["attempts"][-1]["load_generator"]["affinity"]["warnings"]
    assert warning.startswith("one core for client and server")
    assert not [path for path in open_folder.iterdir() if path.name.startswith("connector-tax")]


def test_study_runs_with_an_unwritable_home(study_file: Path) -> None:
    done = drive(study_file, {"HOME": "/proc/self"})
    assert done.returncode == 0, done.stdout
    assert index_of(study_file)["status"] == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_full_temporary_folder_is_replaced_by_another(tmp_path: Path, study_file: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=1", "tmpfs", str(full)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        done = drive(study_file, {"TMPDIR": str(full)})
    finally:
        subprocess.run(["umount", str(full)], check=True)
    # There is always another folder: /tmp, /var/tmp, the working folder.
    assert done.returncode == 0, done.stdout
    assert index_of(study_file)["status"] == "done"


def test_umask_that_forbids_everything_is_reported(study_file: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read and write whatever the mode is")
    done = drive(study_file, None, "sh", "-c", 'umask 777; exec "$0" "$@"')
    assert done.returncode == 2
    assert "Permission denied" in done.stdout
    assert "Traceback" not in done.stdout
