"""Test power cuts at 20 moments spread over a study: it completes from the disk's content.

The study runs on an ext4 in an image file. A copy of the image holds what the file system had
written to its device at that moment, and nothing that was only in the kernel's memory.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_tax.files import sha256_file
from tests.workflow.harness import complete_after_kill, prepare, run, smaller, start

pytestmark = [pytest.mark.workflow, pytest.mark.long, pytest.mark.timeout(900)]
MOMENTS = 20
IMAGE_MB = 96


def mount(image: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", folder], check=True)


def copy_of_one_moment(image: Path, device: str, target: Path) -> None:
    """Copy the image at a moment when nothing is written to it."""
    written = Path(f"/sys/block/{device}/stat")
    for _ in range(1000):
        before = written.read_text().split()
        subprocess.run(["cp", image, target], check=True)
        # Fields: completed writes, and requests in flight.
        if written.read_text().split()[4:9:4] == [before[4], "0"]:
            return
    pytest.fail("the disk is never at rest for as long as a copy takes")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Yield images of the disk at MOMENTS moments of one undisturbed study."""
    root = tmp_path_factory.mktemp("cuts")
    image, disk = root / "disk.ext4", root / "disk"
    with image.open("wb") as stream:
        stream.truncate(IMAGE_MB << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        mount(image, disk)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"making and mounting an ext4 image needs root: {error}")
    try:
        begun = time.monotonic()
        assert run(prepare(disk / "whole", smaller), "all").returncode == 0
        duration_s = time.monotonic() - begun
        shutil.rmtree(disk / "whole")
        listed = subprocess.run(["losetup", "-j", image], capture_output=True, text=True)
        device = Path(listed.stdout.partition(":")[0]).name
        prepare(disk / "study", smaller)
        os.sync()  # in real use the study file was written long before
        process = start(disk / "study", "all")
        begun, copies = time.monotonic(), []
        for moment in range(MOMENTS):
            while time.monotonic() < begun + duration_s * (moment + 0.5) / MOMENTS:
                time.sleep(0.005)
            copies.append(root / f"cut{moment}.ext4")
            copy_of_one_moment(image, device, copies[-1])
        assert process.wait(timeout=600) == 0
    finally:
        unmount(disk)
    yield copies
    shutil.rmtree(root)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_study_completes_after_a_power_cut(tmp_path: Path, images: list[Path], moment: int) -> None:
    disk = tmp_path / "disk"
    mount(images[moment], disk)
    try:
        folder = disk / "study"
        indexes = [json.loads(p.read_text()) for p in folder.rglob("index.json")]
        for path in folder.rglob("index.json"):
            for cell in json.loads(path.read_text())["cells"]:
                for name, digest in cell["files"].items():
                    assert sha256_file(path.parent / cell["cell"] / name) == digest
        print(f"{len(indexes)} launches had an index")
        complete_after_kill(folder)
    finally:
        unmount(disk)
