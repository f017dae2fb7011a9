"""Test writing to pipes, devices, links and standard streams, which stay what they are."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from connector_tax.files import ArtifactError, read_json, read_jsonl, sha256_tree, write_bytes

WRITE = """
import sys
from pathlib import Path
from connector_tax.files import write_bytes
print("before")
write_bytes(Path(sys.argv[1]), b"data\\n")
print("after")
"""


def test_named_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_bytes(pipe, b"data")
    assert pipe.is_fifo()
    reader.join(5)
    assert read == [b"data"]


def test_symbolic_link_is_followed_on_write(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "file", tmp_path / "link"
    link.symlink_to(target)
    for data in (b"new", b"newer"):
        write_bytes(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert sorted(path.name for path in target.parent.iterdir()) == ["file"]


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "FILE"])
def test_standard_output_stays_open_after_writing_to_it(path: str, tmp_path: Path) -> None:
    file = tmp_path / "out"
    arguments = [sys.executable, "-c", WRITE, str(file) if path == "FILE" else path]
    with file.open("wb") as out:
        subprocess.run(arguments, stdout=out, check=True)
    assert file.read_text() == "before\ndata\nafter\n"


def test_write_to_a_full_device_raises_and_keeps_the_device() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_bytes(Path("/dev/full"), b"data")
    assert Path("/dev/full").is_char_device()


def test_folder_digest_depends_on_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    digests = {sha256_tree(tmp_path)}
    (tmp_path / "a").write_text("2")
    digests.add(sha256_tree(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    digests.add(sha256_tree(tmp_path))
    assert len(digests) == 3


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 2, "a": 1}}]', '{"a": 1, "\\u0061": 2}']
)
def test_duplicate_key_is_refused_in_every_json_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text + "\n")
    message = f"{path}.*found key 'a' twice in one object"
    with pytest.raises(ArtifactError, match=message):
        read_json(path)
    with pytest.raises(ArtifactError, match=message):
        list(read_jsonl(path))
