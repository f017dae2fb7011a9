"""`snakemake replot` of an archive on a machine with no engine, no network and no configuration."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from connector_tax.config import ROOT
from connector_tax.figures.names import NAMES
from connector_tax.files import read_json
from connector_tax.provenance.views import digest
from tests.provenance.forged_archives import members_of, write_archive
from tests.workflow.harness import SNAKEMAKE, ended
from tests.workflow.test_dry_run import planned

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(300)]
LEFT = ("analysis/old_table.csv", "figures/fig99_old.png")
# Loaded by every Python process of the run: there is no engine, no vLLM and no network.
BARE_MACHINE = """
import socket, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("connector_tax.engine", "vllm")):
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Absent())
class Offline(socket.socket):
    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            raise OSError("this machine has no network")
        return super().connect(address)
    connect_ex = connect
socket.socket = Offline
"""


class Machine:
    """A fresh folder with an archive and nothing else."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self.folder = folder
        self.archive = archive
        bare = folder / "bare"
        bare.mkdir()
        (bare / "sitecustomize.py").write_text(BARE_MACHINE)

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bare'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        options = ["--snakefile", str(ROOT / "Snakefile"), "--cores", "1", *arguments]
        command = [SNAKEMAKE, *options, "--config", f"archive={self.archive}"]
        return ended(command, self.folder, PYTHONPATH=path)


@pytest.fixture(scope="module")
def source(packed: Path) -> Path:
    """Return a folder with a published study and its archive."""
    return packed.parent


Replotted = tuple[Machine, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def replotted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Replotted:
    """Return the default target, in a checkout whose manifest names the archive.

    An earlier release unpacked it there, and made files that this one does not make.
    """
    archive = shutil.copy(source / "synthetic.tar.zst", tmp_path_factory.mktemp("archive"))
    machine = Machine(tmp_path_factory.mktemp("machine"), Path(archive))
    shutil.copy(source / "MANIFEST.md", machine.folder)
    assert machine.snakemake("--until", "unpack").returncode == 0
    for name in LEFT:
        path = machine.folder / "results/replot/synthetic" / name
        path.parent.mkdir()
        path.write_text("x\n")
    return machine, machine.snakemake()


def test_replot_reproduces_every_file_bit_for_bit_and_audits_it(
    replotted: Replotted, source: Path
) -> None:
    machine, done = replotted
    assert done.returncode == 0, done.stdout + done.stderr
    published = source / "results" / "synthetic"
    redrawn = machine.folder / "results" / "replot" / "synthetic"
    files = [path for tree in ("analysis", "figures") for path in (published / tree).iterdir()]
    assert len(files) > 2 * len(NAMES)
    for path in files:
        assert digest(redrawn / path.relative_to(published)) == digest(path), path
    counts = read_json(redrawn / "audit.json")["counts"]
    assert counts["FAIL"] == 0
    assert counts["PASS"] > 200
    assert "0 FAIL" in done.stdout
    assert "0 NOT CHECKABLE" in done.stdout


def test_files_of_an_earlier_replot_are_removed(replotted: Replotted) -> None:
    machine, done = replotted
    assert done.returncode == 0, done.stdout + done.stderr
    for name in LEFT:
        assert not (machine.folder / "results/replot/synthetic" / name).exists()


def test_replot_writes_only_its_folder(replotted: Replotted) -> None:
    machine, _ = replotted
    assert [path.name for path in (machine.folder / "results").iterdir()] == ["replot"]
    left = {path.name for path in machine.folder.iterdir()}
    assert left <= {"bare", "results", ".snakemake", "cache", "MANIFEST.md"}


def test_replot_has_no_measuring_rule(replotted: Replotted) -> None:
    machine, _ = replotted
    listed = set(machine.snakemake("--list-rules").stdout.split())
    assert {"unpack", "analyse", "replot"} <= listed
    measuring = {"phase_a", "phase_b", "phase_bp", "preflight", "patch_apply", "study", "all"}
    assert not listed & measuring


def test_a_second_replot_only_audits_again(replotted: Replotted) -> None:
    machine, _ = replotted
    again = planned(machine.snakemake("--dry-run", "replot").stdout)
    assert again["replot"] == 1
    assert not {"analyse", "unpack"} & again.keys()


def test_another_archive_is_unpacked_though_its_file_is_older(replotted: Replotted) -> None:
    machine, _ = replotted
    genuine, time_ns = machine.archive.read_bytes(), machine.archive.stat().st_mtime_ns
    try:
        write_archive(machine.archive, members_of(machine.archive))
        assert machine.archive.read_bytes() != genuine
        os.utime(machine.archive, ns=(0, 0))
        again = planned(machine.snakemake("--dry-run", "replot").stdout)
    finally:
        machine.archive.write_bytes(genuine)
        os.utime(machine.archive, ns=(time_ns, time_ns))
    assert again["unpack"] == 1


def test_altered_picture_or_archive_fails_the_replot_audit(
    replotted: Replotted,
) -> None:
    machine, _ = replotted
    manifest = machine.folder / "MANIFEST.md"
    picture = machine.folder / "results/replot/synthetic/figures/fig1_ttft_vs_rate.png"
    genuine, intact = manifest.read_text(), picture.read_bytes()
    try:
        manifest.write_text(re.sub(r"sha256 `[0-9a-f]{64}`", f"sha256 `{'0' * 64}`", genuine))
        picture.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        done = machine.snakemake("replot")
    finally:
        manifest.write_text(genuine)
        picture.write_bytes(intact)
    assert done.returncode != 0
    assert "FAIL archive file: sha256 is" in done.stdout
    output = done.stdout + done.stderr
    assert "figures/fig1_ttft_vs_rate.png is not the published file" in output


@pytest.mark.parametrize("damage", ["cut off", "no archive"])
def test_a_damaged_archive_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, damage: str
) -> None:
    data = (source / "synthetic.tar.zst").read_bytes()
    bad = tmp_path / "bad.tar.zst"
    bad.write_bytes(data[:-100] if damage == "cut off" else b"PK\x03\x04" + data)
    folder = tmp_path / "machine"
    folder.mkdir()
    machine = Machine(folder, bad)
    done = machine.snakemake("replot")
    assert done.returncode != 0
    assert f"{bad}: refused" in done.stdout + done.stderr
    assert list((folder / "results").rglob("*.json")) == []
