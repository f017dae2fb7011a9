"""What of the caller's environment reaches a server: the same by the driver and by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from connector_tax.servers.kinds import ServerCommand, free_port
from connector_tax.study.server import Server
from connector_tax.study.server_command import (
    can_change,
    launch_script,
    shown,
    unset_lines,
)

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
HOSTILE = {
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "UCX_TLS": "tcp",
    "NCCL_DEBUG": "INFO",
    "MC_LOG_LEVEL": "trace",
    "LMCACHE_CHUNK_SIZE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "HF_HUB_OFFLINE": "0",
    "OMP_NUM_THREADS": "64",
    "TORCH_LOGS": "all",
    "TORCHINDUCTOR_CACHE_DIR": "/x",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
    "PYTHONPATH": "/somewhere",
    "PYTHONDEVMODE": "1",
    "MKL_NUM_THREADS": "64",
    "GOMP_CPU_AFFINITY": "0",
    "KMP_AFFINITY": "none",
    "NIXL_LOG_LEVEL": "DEBUG",
    "MOONCAKE_CONFIG_PATH": "/x",
    "FLASHINFER_WORKSPACE_BASE": "/x",
    "TRITON_CACHE_DIR": "/x",
    "TRANSFORMERS_CACHE": "/x",
    "LD_LIBRARY_PATH": "/x",
    "LD_PRELOAD": "",
    "MALLOC_ARENA_MAX": "1",
    "AGENTIC_STEP_LOG_PATH": "/tmp/elsewhere",
}
MACHINE = {"CUDA_VISIBLE_DEVICES": "3", "HF_HOME": "/models", "HF_TOKEN": "hf_secret"}
OF_THE_STUDY = {"OMP_NUM_THREADS": "1", "VLLM_API_KEY": "", "ODD": "a b;$(x)"}


def relevant(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if can_change(name)}


def test_the_driver_and_a_launch_by_hand_give_the_server_the_same_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**HOSTILE, **MACHINE}.items():
        monkeypatch.setenv(name, value)
    command = ServerCommand(["python", "-c", SHOW], OF_THE_STUDY)
    server = Server(tmp_path, command, "test", free_port())
    server.start()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    server.stop(1)
    assert all(map(can_change, HOSTILE))
    driven = json.loads((tmp_path / "vllm_stdout.log").read_text())
    by_hand = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    )
    wanted = {"OMP_NUM_THREADS": "1", "VLLM_API_KEY": "", **MACHINE}
    assert relevant(driven) == wanted
    assert relevant(json.loads(by_hand.stdout)) == wanted
    assert driven["ODD"] == OF_THE_STUDY["ODD"]


@pytest.mark.parametrize(
    ("name", "value", "recorded"),
    [
        ("OMP_NUM_THREADS", "1", "1"),
        ("CUDA_VISIBLE_DEVICES", "3", "3"),
        ("VLLM_API_KEY", "", ""),
        ("VLLM_API_KEY", "abc", None),
        ("HF_TOKEN", "hf_secret", None),
        ("HF_ENDPOINT", "https://hub/?signature=abc", None),
        ("LMCACHE_EXTRA_CONFIG", '{"access": "abc"}', None),
        ("UCX_OF_A_LATER_VERSION", "abc", None),
    ],
)
def test_a_value_is_recorded_where_its_name_is_listed_or_it_is_empty(
    name: str, value: str, recorded: str | None
) -> None:
    assert shown({name: value}) == {name: recorded}


def test_the_lines_leave_a_shell_without_such_variables_as_it_is(tmp_path: Path) -> None:
    script = "\n".join(["set -euo pipefail", *unset_lines(), "env -0"])
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C", "MCX": "1"}
    done = subprocess.run(
        ["bash", "-c", script], env=kept, check=True, capture_output=True, text=True
    )
    seen = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert kept.items() <= seen.items()


def test_a_callers_command_finds_the_projects_modules_from_the_callers_folder(
    tmp_path: Path,
) -> None:
    here, elsewhere, modules = (tmp_path / name for name in ("results/here", "a/b/c", "overlay"))
    for folder in (here, elsewhere, modules):
        folder.mkdir(parents=True)
    (modules / "found_it.py").touch()
    command = ServerCommand(
        [sys.executable, "-c", "import found_it, os; print(os.getcwd())"],
        {"PYTHONPATH": "{root}/overlay"},
        callers=True,
    )
    script = here / "launch.sh"
    script.write_text(launch_script(command, "title", "../..", callers_folder="../../a/b/c"))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.stdout.strip() == str(elsewhere), done.stderr
