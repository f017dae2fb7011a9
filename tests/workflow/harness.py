"""Run Snakemake on the tiny study in its own folder."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from connector_tax.config import ROOT
from connector_tax.files import read_json, sha256_file
from connector_tax.study.guard import PARENT_VARIABLE
from connector_tax.study.guardian import LAUNCH_VARIABLE

TINY = ROOT / ".test" / "config" / "config.yaml"
SNAKEMAKE = str(Path(sys.executable).with_name("snakemake"))


def command(folder: Path, *targets: str, options: tuple[str, ...] = ()) -> list[str]:
    return [
        *(SNAKEMAKE, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)),
        # Tests read output that the profile would suppress.
        *("--cores", "1", "--quiet", "host"),
        *("--configfile", str(folder / "study.yaml"), *options, "--", *targets),
    ]


def environment(folder: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    return {
        **inherited,
        "TMPDIR": str(temporary_folder(folder)),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def device_for(folder: Path) -> str:
    """Return the name of a device that belongs to `folder` alone."""
    return f"t{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def temporary_folder(folder: Path) -> Path:
    """Return a private folder with a short path (it holds Unix sockets) that belongs to `folder`
    alone.
    """
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"ct-{name}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def smaller(text: str) -> str:
    """Return a smaller TINY for frequent runs: two configurations, one shape, short cells."""
    changes = {
        "[plain, noop_connector, mooncake_both]": "[plain, noop_connector]",
        "[plain, mooncake_both]": "[plain]",
        "phase_b: {input_tokens: [32, 64]": "phase_b: {input_tokens: [32]",
        "warmup_s: 0.2, floor_s: 0.8": "warmup_s: 0.1, floor_s: 0.6",
        "min_completed: 16": "min_completed: 10",
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def prepare(folder: Path, edit: Callable[[str], str] = str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # One device for each folder: tests must not wait for each other.
    text = TINY.read_text().replace("device: tiny", f"device: {device_for(folder)}")
    (folder / "study.yaml").write_text(edit(text))
    return folder


def ended(
    arguments: Sequence[str | Path], folder: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a study's folder, with added environment variables."""
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**environment(folder), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=550,
    )


def run(
    folder: Path, *targets: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Snakemake to its end on the study of a folder."""
    return ended(command(folder, *targets, options=options), folder)


def resume_after_kill(folder: Path, target: str = "all") -> None:
    """Complete a study whose Snakemake was killed, or a part of it."""
    assert run(folder, target, options=("--unlock",)).returncode == 0
    done = run(folder, target, options=("--rerun-incomplete",))
    assert done.returncode == 0, done.stdout + done.stderr


def complete_after_kill(folder: Path) -> None:
    """Complete a whole study, check that it passes its audit and leaves no unfinished file."""
    resume_after_kill(folder)
    assert read_json(folder / "results/tiny/complete.json") == {"complete": True}
    assert [p for p in folder.rglob("*") if p.name.endswith((".partial", ".tmp"))] == []
    audited = run(folder, "audit")
    assert audited.returncode == 0, audited.stdout


def start(folder: Path, *targets: str) -> subprocess.Popen[bytes]:
    output = (folder / "snakemake.log").open("wb")
    return subprocess.Popen(
        command(folder, *targets),
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(
    condition: Callable[[], bool], process: "subprocess.Popen[Any]", timeout_s: float = 120
) -> None:
    """Poll for a state of the file system or the process table."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the process ended before the condition came true"
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def finished(results: Path) -> dict[str, tuple[str, int]]:
    """Return hash and modification time of every file of a study's finished cells."""
    return {
        str(path.relative_to(results)): (sha256_file(path), path.stat().st_mtime_ns)
        for record in results.glob("runs/*/block*/*/*/cell_*.json")
        if not record.parent.suffix and not record.parents[1].suffix
        for path in record.parent.iterdir()
    }


def passed_claims(results: Path) -> set[tuple[str, str]]:
    """Return kind and subject of each claim that the audit of a study has passed."""
    claims = read_json(results / "audit.json")["claims"]
    return {(claim["kind"], claim["subject"]) for claim in claims if claim["verdict"] == "PASS"}


def of_this_study(folder: Path) -> Iterator[psutil.Process]:
    """Yield every process whose command line or environment names the folder."""
    name = str(folder)
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(name in text for text in texts):
                yield process
        except psutil.Error:
            continue


def server_of(launch: Path) -> psutil.Process | None:
    """Return the first process of a launch's server; None while there is none."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_VARIABLE) == str(launch.resolve()):
                return process
        except psutil.Error:
            continue
    return None


def gone(folder: Path, timeout_s: float = 20) -> list[str]:
    """Return command lines of the study's processes that are still there after `timeout_s`."""
    _, alive = psutil.wait_procs(list(of_this_study(folder)), timeout=timeout_s)
    return [" ".join(process.cmdline()) for process in alive if process.is_running()]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to Snakemake's process group: Snakemake, its shells and drivers."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
