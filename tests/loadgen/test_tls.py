"""Test https: trusted certificates, stamps, and reused connections."""

import asyncio
import socket
import socketserver
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from connector_tax.loadgen.__main__ import main
from connector_tax.loadgen.generator import LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.http import TlsSession
from connector_tax.loadgen.messages import Target, TlsSettings
from connector_tax.loadgen.pool import Pool
from tests.loadgen.certificates import make_certificate, server_context
from tests.loadgen.fault_server import (
    HEAD,
    FaultServer,
    Fin,
    Reset,
    Step,
    chunked,
    good_answer,
    good_events,
)
from tests.loadgen.running import answered, run_scripts

FEW = LoadGeneratorOptions(connections_per_worker=4, strict=True)
SHORT: dict[str, Any] = {"floor_s": 0.2, "cap_s": 0.2}
SCRIPTS: dict[str, list[Step]] = {
    "good": [good_answer()],
    "cut": [HEAD + chunked(*good_events()[:2], last=False), Fin],
    "reset": [HEAD + chunked(*good_events()[:2], last=False), Reset],
}


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def endpoint(server: FaultServer, ca_file: Path | None, *, insecure: bool = False) -> Target:
    ca = None if ca_file is None else str(ca_file)
    return Target("127.0.0.1", server.port, tls=TlsSettings("127.0.0.1", ca, insecure))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_requests_have_kernel_stamps_and_reuse_connections(
    pems: tuple[Path, Path], version: ssl.TLSVersion
) -> None:
    with (
        FaultServer(SCRIPTS, tls=server_context(*pems, version)) as server,
        LoadGenerator(endpoint(server, pems[0]), FEW) as generator,
    ):
        result = run_scripts(generator, ["good"] * 60)
        # Session tickets, which come on an idle connection, do not end it.
        assert server.connections == 4
    assert {(r.status, r.completion_tokens) for r in result.records} == {("ok", 3)}
    assert result.clock == "kernel"
    worker = result.health["processes"]["worker0"]
    assert worker["reads"] >= 60
    assert worker["unstamped_reads"] == 0
    for record in result.records:
        assert record.t_send_ns is not None
        assert record.t_first_token_ns is not None
        assert record.t_send_ns < record.t_first_token_ns


def test_a_read_is_stamped_before_it_is_decrypted(
    pems: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decrypt = TlsSession.decrypt
    begun_ns: list[int] = []

    def slow(session: TlsSession, data: bytes | memoryview) -> bytes:
        begun_ns.append(time.monotonic_ns())
        time.sleep(0.02)
        return decrypt(session, data)

    async def good(port: int) -> None:
        tls = TlsSettings("127.0.0.1", str(pems[0]), insecure=False)
        loop = asyncio.get_running_loop()
        pool = Pool(loop, socket.AF_INET, ("127.0.0.1", port), 1, tls)
        response = await answered(pool, "good")
        assert response.status == 200
        assert response.head_ns <= begun_ns[-1]
        pool.close()

    monkeypatch.setattr(TlsSession, "decrypt", slow)
    with FaultServer(SCRIPTS, tls=server_context(*pems)) as server:
        uvloop.run(good(server.port))


def test_untrusted_certificate_fails_every_request_unless_its_ca_is_given(
    pems: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_certificate(tmp_path, "DNS:elsewhere.example")
    with FaultServer(SCRIPTS, tls=server_context(*pems)) as server:
        for target, message in (
            (endpoint(server, None), "self-signed certificate"),
            (endpoint(server, other[0]), "self-signed certificate"),
        ):
            with LoadGenerator(target, FEW) as generator:
                result = run_scripts(generator, ["good"] * 3, **SHORT)
            assert {r.error_kind for r in result.records} == {"tls_failed"}
            assert message in str(result.records[0].error_detail)
            assert message in str(result.health["connect_errors"])
        with LoadGenerator(endpoint(server, None, insecure=True), FEW) as generator:
            result = run_scripts(generator, ["good"] * 3, **SHORT)
        assert {r.status for r in result.records} == {"ok"}
    with FaultServer(SCRIPTS, tls=server_context(*other)) as server:
        with LoadGenerator(endpoint(server, other[0]), FEW) as generator:
            result = run_scripts(generator, ["good"] * 3, **SHORT)
        assert "mismatch" in str(result.records[0].error_detail)


def test_truncated_response_has_the_same_error_kind_with_and_without_tls(
    pems: tuple[Path, Path],
) -> None:
    with (
        FaultServer(SCRIPTS, tls=server_context(*pems)) as server,
        LoadGenerator(endpoint(server, pems[0]), FEW) as generator,
    ):
        result = run_scripts(generator, ["cut", "good", "reset"], **SHORT)
    kinds = [r.error_kind for r in result.records]
    assert kinds[:2] == ["closed_mid_response", None]
    assert kinds[2] in ("reset_mid_response", "closed_mid_response")


class _Plain(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


class _Closing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(65536)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (_Plain, "WRONG_VERSION_NUMBER"),
        (_Closing, "the server closed the connection in the handshake"),
    ],
)
def test_failed_tls_handshake_has_its_own_error_kind(
    handler: type[socketserver.BaseRequestHandler], message: str
) -> None:
    tls = TlsSettings("127.0.0.1", None, True)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        target = Target("127.0.0.1", server.server_address[1], tls=tls)
        with LoadGenerator(target, FEW) as generator:
            result = run_scripts(generator, ["good"] * 2, **SHORT)
        server.shutdown()
    assert {r.error_kind for r in result.records} == {"tls_failed"}
    (detail,) = {str(r.error_detail) for r in result.records}
    assert message in detail


def test_command_measures_an_https_url(
    pems: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultServer(SCRIPTS, lambda _: "good", server_context(*pems)) as server:
        arguments = [
            *("--url", f"https://localhost:{server.port}", "--rate", "20", "--duration", "0.5"),
            *("--prompt", "p", "--connections", "4", "--no-affinity", "--wait", "0"),
        ]
        assert main([*arguments, "--ca-file", str(pems[0])]) in (0, 1)
        assert main([*arguments, "--insecure"]) in (0, 1)
        assert len(server.requests) > 10
        assert b"Host: localhost:" in server.heads[0]
        count = len(server.requests)
        assert main(arguments) == 3
        assert "certificate" in capsys.readouterr().err
        assert len(server.requests) == count
