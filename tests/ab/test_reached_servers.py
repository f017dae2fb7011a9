"""Test servers behind TLS, a key and a base path, and servers with wrong answers."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connector_tax.ab import ask as asking
from connector_tax.ab.arguments import parse
from connector_tax.ab.ask import AskError, asked
from connector_tax.ab.design import engine_section
from connector_tax.config import refuse_secrets
from connector_tax.servers.kinds import free_port
from connector_tax.study import endpoint
from connector_tax.study.scraper import MetricsSampler
from connector_tax.vllm import overlay
from tests.loadgen.certificates import make_certificate

STUB = Path(__file__).with_name("stub_server.py")
KEY = "sk-abcdefghijklmnop0123"


@contextlib.contextmanager
def stub(*words: str) -> Iterator[int]:
    """Yield the port of a stub server that the test started."""
    port = free_port()
    host = dict(word.split("=", 1) for word in words if "=" in word).get("host", "127.0.0.1")
    with subprocess.Popen([sys.executable, str(STUB), str(port), *words]) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection((host, port)).close()
                    break
                time.sleep(0.01)
            yield port
        finally:
            process.kill()


def ask(root: Path, url: str, *further: str) -> str:
    """Query a running server; return the files that the query leaves on the disk."""
    options = parse(["--baseline-url", url, "--candidate-url", "http://127.0.0.1:1", "--rate", "1",
                     "--shape", "8x8", *further])  # fmt: skip
    overlay.install(root / "patch" / "overlay")
    section = engine_section(options)
    refuse_secrets(section, "design")
    with asked(
        "baseline", section, root, timeout_s=60, model=None, chat=False, ids=True, say=print
    ) as (server, found):
        assert found.served["chat"]
        with MetricsSampler(server.endpoint, 1.0, ()) as sampler:
            sampler.open(root / "scrapes", "seed")
            sampler.close()
    kept = [path.read_text() for path in root.rglob("*") if path.is_file()]
    return "".join(kept) + json.dumps(section)


def test_server_behind_tls_key_and_base_path_is_queried_without_recording_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("MY_KEY", KEY)
    with stub(f"tls={certificate},{key}", f"key={KEY}", "base=/api") as port:
        url = f"https://127.0.0.1:{port}/api/v1"
        root = tmp_path / "trusted"
        kept = ask(root, url, "--api-key-env", "MY_KEY", "--ca-file", str(certificate))
        assert KEY not in kept
        assert "/metrics answered 404" in kept, "the scraper reached it"
        ask(tmp_path / "any", url, "--api-key-env", "MY_KEY", "--insecure")
        with pytest.raises(AskError, match=r"requires a key, and none is sent \(--api-key-env\)"):
            ask(tmp_path / "keyless", url, "--insecure")
        monkeypatch.setenv("MY_KEY", "another")
        with pytest.raises(AskError, match="the server rejects the key in MY_KEY"):
            ask(tmp_path / "wrong", url, "--insecure", "--api-key-env", "MY_KEY")


def test_key_is_sent_in_the_named_header_to_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with stub(f"key={KEY}", "header=api-key") as port:
        url = f"http://127.0.0.1:{port}"
        named = ("--api-key-env", "MY_KEY", "--api-key-header", "api-key")
        kept = ask(tmp_path / "named", url, *named)
        assert KEY not in kept
        assert "/metrics answered 404" in kept, "the scraper reached it"
        with pytest.raises(AskError, match=r"MY_KEY, sent as Authorization \(--api-key-header\)"):
            ask(tmp_path / "bearer", url, *named[:2])


@pytest.mark.parametrize("word", ["page", "odd"])
def test_server_with_harmless_oddities_is_queried(tmp_path: Path, word: str) -> None:
    with stub(word) as port:
        ask(tmp_path, f"http://127.0.0.1:{port}")


def test_server_problem_is_an_error_only_if_it_persists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)
    certificate, key = make_certificate(tmp_path)
    encrypted = f"tls={certificate},{key}"

    def reported(scheme: str, word: str, problem: str) -> None:
        with stub(word) as port:
            began = time.monotonic()
            with pytest.raises(AskError, match=problem):
                ask(tmp_path / scheme / word[:4], f"{scheme}://127.0.0.1:{port}")
            assert 0.5 <= time.monotonic() - began < 60

    cases = (
        ("http", "absent", "/v1/models answers 404"),
        ("http", "redirect", "answers 301, a redirect to https://elsewhere/v1/models"),
        ("http", "health=500", "/health answers 500"),
        ("http", encrypted, "disconnected|reset by peer"),
        ("https", "same", "https://127.0.0.1:.*SSL.*; allowed: http:// for a server without TLS"),
        ("https", encrypted, "CERTIFICATE_VERIFY_FAILED.*; allowed: --ca-file with"),
    )
    with ThreadPoolExecutor(len(cases)) as threads:
        list(threads.map(lambda case: reported(*case), cases))


def test_answer_that_is_nested_too_deeply_is_refused_in_a_line() -> None:
    with pytest.raises(asking._WrongAnswer, match="allowed: a JSON object"):
        asking._object("/v1/models", "[" * 100_000)


def test_models_nested_too_deeply_are_refused_in_a_line(tmp_path: Path) -> None:
    with (
        stub("nested") as port,
        pytest.raises(AskError, match=r"/v1/models answers .*allowed: a JSON object"),
    ):
        ask(tmp_path, f"http://127.0.0.1:{port}")


def test_server_that_forbids_health_but_lists_its_models_is_queried(tmp_path: Path) -> None:
    with stub("health=403") as port:
        ask(tmp_path, f"http://127.0.0.1:{port}")


def test_server_that_is_healthy_while_it_loads_is_waited_for(tmp_path: Path) -> None:
    with stub("healthy", "loads=1") as port:
        ask(tmp_path, f"http://127.0.0.1:{port}")


def test_running_server_at_another_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.1)
    with stub("host=::1") as port:
        url = f"http://localhost:{port}"
        named = rf"only at ::1, not at http://127.0.0.1:{port}; allowed: a URL with such an address"
        with pytest.raises(AskError, match=named):
            ask(tmp_path / "other", url)
        ask(tmp_path / "right", f"http://[::1]:{port}")


def test_error_names_a_certificate_for_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)
    certificate, key = make_certificate(tmp_path, "DNS:elsewhere")
    with (
        stub(f"tls={certificate},{key}") as port,
        pytest.raises(AskError, match=r"mismatch.*; allowed: a host that the certificate names"),
    ):
        ask(tmp_path / "asked", f"https://127.0.0.1:{port}", "--ca-file", str(certificate))


def test_process_that_forwards_to_the_server_is_not_measured_as_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub("named=docker-proxy") as port:
        url = f"http://127.0.0.1:{port}"
        ask(tmp_path, url)
        assert f"docker-proxy listens at {url}, and the server behind it" in capsys.readouterr().out
        # The kernel forwards: no process listens.
        monkeypatch.setattr("psutil.net_connections", lambda _: [])
        ask(tmp_path, url)
        assert f"no visible process listens at {url}, and the" in capsys.readouterr().out


def test_server_on_another_machine_gives_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    # Reserved for documentation (RFC 5737): no machine has this address.
    servers = ["--baseline-url", "http://192.0.2.1:80", "--candidate-url", "http://127.0.0.1:2"]
    parse([*servers, "--rate", "1", "--shape", "8x8"])
    assert capsys.readouterr().err == (
        "warning: 192.0.2.1 is another machine: client, network and server are measured together\n"
    )
