"""Two servers that run already: measured in turns, never started, never ended, and archived."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from connector_tax.servers.kinds import free_port
from tests.ab.test_broken_inputs import NO_NUMBER, environment, left_running, run
from tests.provenance.forged_archives import members_of
from tests.workflow.harness import device_for


@contextlib.contextmanager
def engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An embedded engine that somebody else has started, and its URL."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "connector_tax.engine", "--port", str(port), *arguments]
    with subprocess.Popen(command, env=environment()) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/v1/models").status_code == httpx.codes.OK:
                        break
            yield process, url
        finally:
            process.kill()


def options(folder: Path, baseline: str, candidate: str, *further: str) -> list[str]:
    """The command line, of a machine that others use."""
    return [
        sys.executable, "-m", "connector_tax", "ab", "--baseline-url", baseline,
        "--candidate-url", f"dear={candidate}", "--rate", "20", "--shape", "64x16",
        "--blocks", "2", "--json", "--shared-machine",
        "--device", device_for(folder).replace("_", "-"), *further,
    ]  # fmt: skip


@pytest.mark.timeout(600)
def test_running_servers_are_compared_left_alone_and_archived(tmp_path: Path) -> None:
    with engine() as (plain, baseline), engine("--configuration", "nixl_both") as (dear, candidate):
        done = run(tmp_path, options(tmp_path, baseline, candidate))
        assert done.returncode == 0, done.stdout + done.stderr
        assert plain.poll() is None
        assert dear.poll() is None
    answer = json.loads(done.stdout)
    assert {finding["config"] for finding in answer["findings"]} == {"dear"}
    tpot = next(f for f in answer["findings"] if f["metric"] == "tpot_p50")
    assert tpot["lo"] < tpot["tax"] < tpot["hi"]
    study = json.loads((tmp_path / "results" / answer["study"] / "study.json").read_text())
    assert study["engine_label"] == "embedded (emulated), launches not replicated"
    memory = next(r for r in answer["resources"] if r["resource"] == "memory_pss_mib")
    assert memory["difference"] > 1, "the memory is that of the process that waits"
    members = {info.name for info, _ in members_of(tmp_path / answer["archive"])}
    # No workflow has run, and an installed package has none.
    assert "ab.json" in members
    assert not any(name.startswith("workflow/") for name in members)
    assert left_running(tmp_path) == []


def test_a_url_where_nothing_listens_is_refused(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    done = run(tmp_path, options(tmp_path, nowhere, nowhere))
    assert done.returncode == NO_NUMBER
    assert f"nothing listens at {nowhere}" in done.stderr
    assert left_running(tmp_path) == []


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (["--beside", "cache {port}"], "--beside: found with a URL"),
        (["--candidate-url", "other=https://example.com"], "allowed: http://127.0.0.1:PORT"),
    ],
)
def test_what_cannot_be_had_with_a_url_is_refused(
    tmp_path: Path, further: list[str], words: str
) -> None:
    done = run(tmp_path, options(tmp_path, "http://localhost:1", "http://localhost:2", *further))
    assert done.returncode == 64
    assert words in done.stderr
