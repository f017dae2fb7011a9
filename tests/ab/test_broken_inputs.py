"""What cannot be measured is refused with one clear line, and leaves nothing running."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from connector_tax.study.guard import LAUNCH_VARIABLE, PARENT_VARIABLE
from tests.workflow.harness import device_for

STUB = Path(__file__).with_name("stub_server.py")
ENGINE = f"{sys.executable} -m connector_tax.engine --port {{port}}"
CHAT = f"{sys.executable} {STUB} {{port}}"
WRONG, NO_NUMBER, STOPPED = 64, 3, 130


def options(folder: Path, *further: str, baseline: str = ENGINE, candidate: str = ENGINE,
            rate: str = "20", shape: str = "64x8") -> list[str]:  # fmt: skip
    """The command line, of a machine that others use."""
    return [
        sys.executable, "-m", "connector_tax", "ab", "--baseline", baseline,
        "--candidate", candidate, "--rate", rate, "--shape", shape, "--shared-machine",
        "--device", device_for(folder).replace("_", "-"), *further,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Of a user's shell."""
    return {name: v for name, v in os.environ.items() if name != PARENT_VARIABLE}


def run(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True,
                          timeout=280)  # fmt: skip


def left_running(folder: Path) -> list[str]:
    """Processes of a server that was started below the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_VARIABLE, "").startswith(str(folder.resolve())):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": "0"}, "--rate: found '0'; allowed: a number above 0"),
        ({"rate": "many"}, "--rate: found 'many'"),
        ({"shape": "64"}, "--shape: found '64'; allowed: input x output tokens"),
        ({"shape": "64x1"}, "--shape: found 1 output token"),
        ({"baseline": "vllm serve M"}, "--baseline: found no {port}"),
        ({"candidate": "vllm serve M"}, "--candidate: found no {port}"),
        ({"candidate": "run_2=serve {port}"}, "--candidate: found the name 'run_2'"),
        ({"candidate": "baseline=serve {port}"}, "--candidate: found the name 'baseline'"),
        ({"candidate": "serve '{port}"}, '--candidate: found "serve \'{port}"'),
        ({"baseline": "serve {port} --api-key sk-abcdefghijklmnop0123"}, "looks like a secret"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    tmp_path: Path, wrong: dict[str, str], words: str
) -> None:
    done = run(tmp_path, options(tmp_path, **wrong))
    assert done.returncode == WRONG
    assert words in done.stderr
    assert "abcdefghijklmnop" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("further", "words"),
    [
        (["--margin", "3"], "--margin: found '3'; allowed: a percentage"),
        (["--blocks", "1"], "--blocks: found '1'; allowed: 2 to 100"),
        (["--beside", "cache --port 5"], "--beside: found no {port}"),
        (["--env", "x=1"], "--env: found 'x=1'; allowed: NAME=VALUE"),
        (["--env", "API_KEY=abcdefghijklmnop"], "--env API_KEY: found what looks like a secret"),
        (["--pythonpath", "nowhere"], "--pythonpath: found 'nowhere'; allowed: a folder"),
        (["--candidate", "again {port}"], "--candidate: found several without a name"),
        (["--candidate-url", "http://127.0.0.1:1"], "not allowed with argument --candidate"),
        (["--baseline-url", "http://127.0.0.1:1"], "not allowed with argument --baseline"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, further: list[str], words: str) -> None:
    done = run(tmp_path, options(tmp_path, *further))
    assert done.returncode == WRONG
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("further", "changed", "words"),
    [
        ([], {"baseline": "false {port}"}, "baseline: the server ended with status 1 before"),
        ([], {"candidate": "nosuch {port}"}, "exec: nosuch: not found"),
        ([], {"baseline": f"{CHAT} 401"}, "answers 401: it asks for a key, and none is sent"),
        ([], {"candidate": CHAT}, "candidate serves another model: model embedded-model -> stub"),
        ([], {"shape": "8000x800"}, "8800 tokens; allowed: at most 8192"),
        ([], {"shape": "4000x8", "rate": "5000"}, "--rate: found 5000; the baseline serves about"),
        (["--model", "other"], {}, "/v1/models names embedded-model; --model names other"),
        (["--ready-timeout", "1"], {"baseline": "sleep 99 {port}"}, "not ready after 1 s"),
        ([], {"baseline": f"bash -c 'setsid {ENGINE} & sleep 1'"}, "has to stay in the foreground"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_measured_is_named(
    tmp_path: Path, further: list[str], changed: dict[str, str], words: str
) -> None:
    # So that what detaches is gone when it is asked.
    if "setsid" in changed.get("baseline", ""):
        changed = {**changed, "shape": "4000x8", "rate": "8"}
    done = run(tmp_path, options(tmp_path, *further, **changed))
    assert words in done.stderr, done.stderr
    assert done.returncode == NO_NUMBER
    assert "Traceback" not in done.stderr
    assert left_running(tmp_path) == []


def test_a_server_that_dies_while_it_is_measured_is_shown_and_the_rest_is_kept(
    tmp_path: Path,
) -> None:
    dies = f"bash -c '[ -e limit ] && exec timeout -s KILL 6 {ENGINE} || exec {ENGINE}'"
    command = options(tmp_path, "--blocks", "2", candidate=dies)
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.startswith("block 1"):
                (tmp_path / "limit").touch()
    said = "".join(told)
    assert process.returncode == NO_NUMBER
    assert "candidate/block0/A failed: the server ended with status" in said, said
    assert "the same command carries on there" in said
    assert left_running(tmp_path) == []


@pytest.mark.parametrize("phase", ["asking baseline", "asking candidate", "block 1"])
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, phase: str) -> None:
    command = options(tmp_path, "--blocks", "2")
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:  # fmt: skip
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if line.startswith(phase):
                # As a terminal does: to the whole group in the foreground.
                os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == STOPPED, "".join(told)
    assert told[-1] == "ab: stopped; what was measured is kept, and the same command carries on\n"
    assert "Traceback" not in "".join(told)
    assert left_running(tmp_path) == []


def test_other_arguments_under_the_same_name_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "mine"
    folder.mkdir(parents=True)
    (folder / "ab.json").write_text('{"rate": [4.0]}')
    done = run(tmp_path, options(tmp_path, "--name", "mine"))
    assert done.returncode == NO_NUMBER
    assert "rate: [4.0] -> [20.0]" in done.stderr or "rate[0]: 4.0 -> 20.0" in done.stderr
    assert "another --name" in done.stderr
