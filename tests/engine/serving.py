"""Launch the embedded engine like the driver, and talk to it over a real socket."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from connector_tax.config import ROOT, load_yaml
from connector_tax.servers.kinds import free_port

EMBEDDED = ROOT / "config" / "embedded.yaml"
MODEL = "embedded-model"


def config_with(changes: dict[str, Any] | None) -> dict[str, Any]:
    """Return config/embedded.yaml with some values changed (one level deep)."""
    config: dict[str, Any] = load_yaml(EMBEDDED)
    for key, value in (changes or {}).items():
        config[key] = {**config[key], **value} if key in config else value
    return config


@dataclass
class Launched:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    stderr: list[str] = field(default_factory=list)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of one request on its own connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get_json(self, path: str) -> Any:
        """Return the JSON of a GET, which must succeed."""
        status, body = self.request("GET", path)
        assert status == 200
        return json.loads(body)

    def ask(self, **fields: Any) -> tuple[int, bytes]:
        """Send a completion request; return status and body."""
        return self.request("POST", "/v1/completions", completion(**fields))

    def stream(self, **fields: Any) -> bytes:
        """Return a streamed completion's whole body."""
        status, body = self.ask(**fields)
        assert status == 200, body
        return body

    def raw(self, **fields: Any) -> Iterator[bytes]:
        """Send a completion request; yield the bytes of each read until the server closes."""
        body = json.dumps(completion(**fields)).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(post(body, "connection: close"))
            while data := connection.recv(1 << 16):
                yield data

    def metrics(self) -> dict[str, float]:
        """Return the samples of the page /metrics."""
        _, page = self.request("GET", "/metrics")
        return {
            sample.name + _own_labels(sample.labels): sample.value
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
        }

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a log in the server's folder."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the server and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(10)


def _own_labels(labels: dict[str, str]) -> str:
    """Return the labels that distinguish the samples of a family."""
    return "".join(f"{{{v}}}" for k, v in labels.items() if k not in ("engine", "model_name"))


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """Return the bytes of a completion request."""
    lines = [f"POST /v1/completions HTTP/{version}", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def completion(**fields: Any) -> dict[str, Any]:
    """Return a completion request: 3 prompt tokens, 8 output tokens, streamed, with usage."""
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {key: value for key, value in {**request, **fields}.items() if value is not None}


def events(body: bytes) -> list[Any]:
    """Return the data of each event of an event stream."""
    lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
    return [
        line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in lines
    ]


def texts(body: bytes) -> list[str]:
    """Return the words of a streamed completion."""
    return [e["choices"][0]["text"] for e in events(body) if e != "[DONE]" and e.get("choices")]


def command(config: Path, configuration: str, port: int, folder: Path) -> list[str]:
    """Return the driver's command line."""
    return [
        *(sys.executable, "-m", "connector_tax.engine", "--config", str(config)),
        *("--configuration", configuration, "--host", "127.0.0.1", "--port", str(port)),
        *("--launch-seed", "7", "--truth-log", str(folder / "truth.jsonl")),
    ]


@contextlib.contextmanager
def launched(
    folder: Path,
    configuration: str = "plain",
    changes: dict[str, Any] | None = None,
    *,
    step_log: bool = True,
) -> Iterator[Launched]:
    """Yield a ready server, and kill it at the end if the test has not stopped it."""
    config = folder / "embedded.json"
    config.write_text(json.dumps(config_with(changes)))
    port = free_port()
    process = subprocess.Popen(
        command(config, configuration, port, folder),
        env={**os.environ, **({"AGENTIC_STEP_LOG_PATH": str(folder / "step")} if step_log else {})},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    server = Launched(process, port, folder)
    for line in process.stderr:
        server.stderr.append(line)
        if "ready on port" in line:
            break
    drain = threading.Thread(target=server.stderr.extend, args=(process.stderr,))
    drain.start()
    try:
        assert process.poll() is None, "".join(server.stderr)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        drain.join(10)
        process.stderr.close()
