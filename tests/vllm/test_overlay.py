"""Test that the probe's overlay is idempotent and leaves the environment's bytes unchanged."""

from pathlib import Path

import pytest

from connector_tax.vllm import overlay
from tests.shared import interpreter
from tests.vllm import stub


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_install_and_remove_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    first = overlay.install(folder)
    before = content(folder)
    assert overlay.install(folder) == first
    assert content(folder) == before
    assert overlay.remove(folder) == sorted(first)
    assert not folder.exists()
    assert overlay.remove(folder) == []


def test_an_overlay_of_another_version_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    fresh = overlay.install(folder)
    probe = folder / overlay.PROBE / "probe.py"
    probe.write_text(f"# {overlay.MARKER}\nan older one\n")
    (folder / f"{overlay.PROBE}.py").write_text(f"# {overlay.MARKER}\na file of an older one\n")
    assert overlay.install(folder) == fresh
    assert set(content(folder)) == set(fresh)


def test_overlay_folder_with_a_foreign_file_is_neither_written_nor_deleted(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "overlay"
    overlay.install(folder)
    mine = folder / "notes.txt"
    mine.write_text("not the probe's")
    before = content(folder)
    for act in (overlay.install, overlay.remove):
        with pytest.raises(overlay.OverlayError, match=r"notes\.txt: not the step probe's"):
            act(folder)
    assert content(folder) == before


def test_a_run_with_the_probe_leaves_the_installed_package_byte_identical(tmp_path: Path) -> None:
    site = stub.write(tmp_path / "site")
    package = site / "vllm"
    before, files = overlay.sources_sha256(package), content(package)
    overlay.install(tmp_path / "overlay")
    stub.drive(site, tmp_path / "overlay", tmp_path / "log", connector="One")
    overlay.remove(tmp_path / "overlay")
    assert overlay.sources_sha256(package) == before
    after = {k: v for k, v in content(package).items() if "__pycache__" not in k}
    assert after == files
    assert overlay.leftovers(package) == []


@pytest.mark.parametrize("where", ["vllm/v1/engine/core.py", f"{overlay.PROBE}.pth"])
def test_leftover_patch_in_the_environment_is_detected(tmp_path: Path, where: str) -> None:
    site = stub.write(tmp_path / "site")
    before = overlay.sources_sha256(site / "vllm")
    path = site / where
    old = path.read_text() if path.exists() else ""
    path.write_text(f"{old}# {overlay.MARKER}\n")
    assert overlay.leftovers(site / "vllm") == [where]
    assert (overlay.sources_sha256(site / "vllm") == before) == where.endswith(".pth")


def test_environment_without_vllm_is_reported(tmp_path: Path) -> None:
    with pytest.raises(overlay.OverlayError, match="cannot be run"):
        overlay.describe_vllm(tmp_path / "no-python")
    broken = interpreter(tmp_path, "echo 'no module vllm' >&2; exit 1")
    with pytest.raises(overlay.OverlayError, match="no module vllm"):
        overlay.describe_vllm(broken)
