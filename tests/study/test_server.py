"""Test a server launch: launch.sh starts it, its whole group ends, an error quotes its log.

The server's environment is the same whether the driver or a user runs launch.sh.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from connector_tax.config import ROOT
from connector_tax.foreign import REDACTED
from connector_tax.servers.kinds import Companion, ServerCommand, ServerError, free_port
from connector_tax.study.processes import engine_cores
from connector_tax.study.server import LOGS, Server
from connector_tax.study.server_command import can_change, launch_script, shown
from tests.study.driving import ANSWERS

# Has a child in its process group.
PARENT = """
import signal, subprocess, sys
{prelude}
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
"""


def web_server(folder: Path, prelude: str = "") -> Server:
    port = free_port()
    code = PARENT.format(prelude=prelude) + ANSWERS
    command = ServerCommand(["python", "-c", code, str(port)], {})
    return Server(folder, command, "test", port)


@pytest.fixture
def started() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


def child_of(folder: Path) -> int:
    return int((folder / "vllm_stdout.log").read_text().split()[1])


@pytest.mark.parametrize(
    ("prelude", "grace_s", "how"),
    [("", 10, "TERM"), ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0.2, "KILL")],
)
def test_stop_ends_the_process_group_and_frees_the_port_even_if_sigterm_is_ignored(
    tmp_path: Path, started: list[Server], prelude: str, grace_s: float, how: str
) -> None:
    server = web_server(tmp_path, prelude)
    started.append(server)
    server.start()
    server.wait_ready(20)
    child = child_of(tmp_path)
    assert psutil.pid_exists(child)
    assert server.stop(grace_s) == how
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


def test_server_that_dies_before_ready_is_reported_with_its_log_without_paths(
    tmp_path: Path,
) -> None:
    code = "import sys; print(sys.argv[1]); sys.exit(sys.argv[1])"
    command = ServerCommand(["python", "-c", code, f"{ROOT}/models: empty"], {})
    server = Server(tmp_path, command, "test", free_port())
    server.start()
    with pytest.raises(ServerError, match="status 1 before it was ready") as failure:
        server.wait_ready(20)
    assert server.stop(grace_s=1) == "dead"
    logs = [(tmp_path / name).read_text() for name in LOGS]
    for text in (str(failure.value), *logs):
        assert "{root}/models: empty" in text
        assert str(ROOT) not in text


@pytest.mark.parametrize(
    ("printed", "first"),
    [
        ("(APIServer pid=7) ValueError: no such model", "ValueError: no such model"),
        ("\\033[1;36m(Worker pid=7)\\033[0;0m OSError: gone", "OSError: gone"),
        (
            "(APIServer pid=7) pydantic_core.ValidationError: 1 validation error for KVConfig\\n"
            "(APIServer pid=7) kv_role\\n"
            "(APIServer pid=7)   Input should be kv_both [type=literal_error, input_value=x]",
            "pydantic_core.ValidationError: 1 validation error for KVConfig kv_role Input should be"
            " kv_both",
        ),
    ],
)
def test_first_error_is_found_after_the_name_of_its_process(
    tmp_path: Path, started: list[Server], printed: str, first: str
) -> None:
    command = ServerCommand(["bash", "-c", f"printf '{printed}\\n'; exit 1"], {})
    server = Server(tmp_path, command, "test", free_port())
    started.append(server)
    server.start()
    with pytest.raises(ServerError) as failure:
        server.wait_ready(20)
    assert f"\nfirst error: {first}\nlog: " in str(failure.value)


def kill_engine_core(server: Server) -> None:
    """Kill the engine cores of a server after the server object has seen them."""
    cores: dict[int, int] = {}
    deadline = time.monotonic() + 60
    while not server.cores or not cores:
        cores = engine_cores(server.pid)
        assert time.monotonic() < deadline, "the server has not seen its engine core"
    for pid in cores:
        core = psutil.Process(pid)
        core.kill()
        # Its parent does not wait for it, so that it stays as a zombie.
        while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


@pytest.mark.parametrize("ready", [True, False])
def test_dead_engine_core_of_a_living_api_server_is_detected(
    tmp_path: Path, started: list[Server], ready: bool
) -> None:
    core = tmp_path / "VLLM::EngineCor"
    shutil.copy(shutil.which("sleep") or "", core)
    code = f"import subprocess; subprocess.Popen([{str(core)!r}, '1000'])\n"
    code += ANSWERS if ready else "import time; time.sleep(1000)"
    port = free_port()
    command = ServerCommand(["python", "-c", code, str(port)], {})
    server = Server(tmp_path, command, "test", port)
    started.append(server)
    server.start()
    if ready:
        server.wait_ready(20)
        kill_engine_core(server)
        with pytest.raises(ServerError, match=r"engine core \(process \d+\) died in cell r5"):
            server.check_alive("in cell r5")
        return
    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_engine_core, server)
        with pytest.raises(ServerError, match=r"engine core .* died before it was ready"):
            server.wait_ready(20)
        killed.result()


def test_server_that_is_never_ready_times_out(tmp_path: Path, started: list[Server]) -> None:
    command = ServerCommand(["sleep", "1000"], {})
    server = Server(tmp_path, command, "test", free_port())
    started.append(server)
    server.start()
    with pytest.raises(ServerError, match=r"not ready after 0\.2 s"):
        server.wait_ready(0.2)
    server.stop(grace_s=5)


def test_a_companion_dies_with_the_server_and_both_with_the_driver(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from connector_tax.study.server import Server;"
        "from connector_tax.servers.kinds import Companion, ServerCommand;"
        "port = int(sys.argv[2]); serve = [sys.executable, '-m', 'http.server', str(port)];"
        "c = ServerCommand(['sleep', '1000'], {}, {}, [Companion('side', serve, port)]);"
        "s = Server(Path(sys.argv[1]), c, 't', 1); s.start();"
        "[time.sleep(0.01) for _ in iter(lambda: 'sleep' in"
        " Path(f'/proc/{s.pid}/cmdline').read_text(), True)];"
        "print(s.pid, s.companion_pids()['side'], flush=True); sys.stdin.read()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(free_port())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None
    started = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert "http.server" in started[1].cmdline()
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    psutil.wait_procs(started, timeout=20)
    for process in started:
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_process_that_left_its_session_and_ignores_sigterm_ends_with_the_driver(
    tmp_path: Path, number: signal.Signals
) -> None:
    stubborn = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid();"
        "print(os.getpid(), flush=True); signal.pause()"
    )
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    code = (
        "import sys; from pathlib import Path; from connector_tax.study.server import Server;"
        "from connector_tax.servers.kinds import ServerCommand;"
        "c = ServerCommand([sys.executable, '-c', *sys.argv[2:]], {});"
        "Server(Path(sys.argv[1]), c, 't', 1).start(); print('up', flush=True); sys.stdin.read()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), child, stubborn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"up\n"
    log, deadline = tmp_path / LOGS[0], time.monotonic() + 20
    while not log.read_text().endswith("\n"):  # another process writes it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    left = psutil.Process(int(log.read_text()))
    # As a scheduler ends a job: its whole process group.
    os.killpg(driver.pid, number)
    driver.communicate()
    psutil.wait_procs([left], timeout=20)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    # And so does what waited to end it.
    waiting = (
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or ())
    )
    assert psutil.wait_procs([*waiting], timeout=20)[1] == []


@pytest.mark.parametrize(
    ("serve", "code", "expected"),
    [
        ("from http.server import test; test(port=port)", "raise ValueError('no such flag')",
         "the server ended with status 1 before it was ready\nfirst error: ValueError: no such"),
        ("raise OSError('no memory')", "pass",
         "side ended before it was ready\nfirst error: OSError: no memory\nlog: "),
    ],
)  # fmt: skip
def test_error_names_the_process_that_ended_first(
    tmp_path: Path, started: list[Server], serve: str, code: str, expected: str
) -> None:
    port = free_port()
    side = Companion("side", [sys.executable, "-c", f"port = {port}; {serve}"], port)
    command = ServerCommand([sys.executable, "-c", code], {}, {}, [side])
    server = Server(tmp_path, command, "test", free_port())
    started.append(server)
    server.start()
    with pytest.raises(ServerError) as error:
        server.wait_ready(20)
    assert expected in str(error.value)


def test_http_companion_is_ready_when_it_answers_200(tmp_path: Path) -> None:
    """Start a companion that listens at once but refuses twice; the server must start only
    later."""
    code = (
        "import http.server as h, sys\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    asked = []\n"
        "    def do_GET(self):\n"
        "        H.asked.append(self.path)\n"
        "        print(*H.asked, flush=True)\n"
        "        self.send_response(503 if len(H.asked) < 3 else 200)\n"
        "        self.end_headers()\n"
        "    def log_message(self, *_):\n"
        "        pass\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    port = free_port()
    companion = Companion("side", [sys.executable, "-c", code, str(port)], port, "/a'b?c=%d")
    script = tmp_path / "launch.sh"
    script.write_text(
        launch_script(ServerCommand(["cat", "side.log"], {}, {}, [companion]), "t", ".")
    )
    done = subprocess.run(["bash", script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "/a'b?c=%d /a'b?c=%d /a'b?c=%d"


def test_temporary_folder_of_a_server_is_deleted_with_it(
    tmp_path: Path, started: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / "launch"
    folder.mkdir()
    prelude = "import tempfile; print(tempfile.mkstemp()[1], file=sys.stderr, flush=True)"
    for _ in range(2):
        server = web_server(folder, prelude)
        started.append(server)
        server.start()
        server.wait_ready(20)
        left = Path((folder / "vllm_stderr.log").read_text().strip())
        assert left.exists()
        assert left.parent.parent == tmp_path
        assert left.parent.stat().st_mode & 0o777 == 0o700
        server.kill()  # a driver that is killed has no time to tidy up; the next start does
    server.stop(grace_s=5)
    assert sorted(tmp_path.iterdir()) == [folder]


# ---- what of the caller's environment reaches a server

SHOW = "import json, os; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))"
# What each is set to is of no interest.
HOSTILE = {"LD_PRELOAD": "", **dict.fromkeys((
    "AGENTIC_STEP_LOG_PATH", "CUDA_LAUNCH_BLOCKING", "FLASHINFER_WORKSPACE_BASE",
    "GOMP_CPU_AFFINITY", "HF_HUB_OFFLINE", "KMP_AFFINITY", "LD_LIBRARY_PATH",
    "LMCACHE_CHUNK_SIZE", "MALLOC_ARENA_MAX", "MC_LOG_LEVEL", "MKL_NUM_THREADS",
    "MOONCAKE_CONFIG_PATH", "NCCL_DEBUG", "NIXL_LOG_LEVEL", "OMP_NUM_THREADS", "PYTHONDEVMODE",
    "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS",
    "TRANSFORMERS_CACHE", "TRITON_CACHE_DIR", "UCX_TLS", "VLLM_LOGGING_LEVEL",
), "/x")}  # fmt: skip
MACHINE = {"CUDA_VISIBLE_DEVICES": "3", "HF_HOME": "/models", "HF_TOKEN": "hf_secret"}
OF_THE_STUDY = {"OMP_NUM_THREADS": "1", "VLLM_API_KEY": "", "ODD": "a b;$(x)"}


def relevant(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if can_change(name)}


def test_launch_script_gives_the_same_environment_and_folder_as_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**HOSTILE, **MACHINE}.items():
        monkeypatch.setenv(name, value)
    command = ServerCommand(["python", "-c", SHOW], OF_THE_STUDY)
    server = Server(tmp_path, command, "test", free_port())
    server.start()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    driven = json.loads((tmp_path / "vllm_stdout.log").read_text())
    server.stop(1)
    assert all(map(can_change, HOSTILE))
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
    again = json.loads(by_hand.stdout)
    assert relevant(again) == wanted
    assert driven["cwd"] == again["cwd"] == os.path.realpath(tmp_path)
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
def test_variable_value_is_recorded_only_if_listed_or_empty(
    name: str, value: str, recorded: str | None
) -> None:
    assert shown({name: value}) == {name: recorded}


def test_callers_command_imports_project_modules_from_its_folder(
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


def test_secrets_of_a_dying_server_are_in_no_message_and_no_log(tmp_path: Path) -> None:
    code = "print('\\x1b]0;owned\\x07TOKEN_OF_STORE=hunter2hunter2'); raise SystemExit(3)"
    server = Server(tmp_path, ServerCommand(["python", "-c", code], {}), "test", free_port())
    server.start()
    with pytest.raises(ServerError, match="status 3 before it was ready") as failure:
        server.wait_ready(20)
    server.stop(grace_s=1)
    assert server.redacted == {LOGS[0]: 1}
    for text in (str(failure.value), (tmp_path / LOGS[0]).read_text()):
        assert REDACTED in text
        assert "hunter2" not in text
    assert "\x1b" not in str(failure.value)
