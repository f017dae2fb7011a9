"""Read an endpoint's URL, resolve its address, build the head of its requests, and wait until it
answers.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from connector_tax import __version__
from connector_tax.foreign import holds_token, printable
from connector_tax.loadgen.http import tls_context
from connector_tax.loadgen.messages import LoadGeneratorError, Target, TlsSettings
from connector_tax.loadgen.sse import excerpt

if TYPE_CHECKING:
    import httpx

PROBE_S = 2.0
PAUSE_S = 0.2
ANSWER_S = 10.0
USER_AGENT = f"connector-tax/{__version__}"
"""Sent as User-Agent; common firewalls refuse requests without it."""
_KEY = re.compile(r"api[-_ ]?key|unauthori[sz]ed|authenticat|authori[sz]ation|credential", re.I)


def target_of(
    url: str,
    *,
    chat: bool,
    key_variable: str | None,
    ca_file: Path | str | None,
    insecure: bool,
    key_header: str | None = None,
    header_lines: Sequence[str] = (),
    stream: bool = True,
    finish_reasons: Sequence[str] = (),
) -> Target:
    """Return the endpoint of a URL.

    Args:
        key_variable: the environment variable that holds its key.
        key_header: the header that sends the key; None: Authorization, as a bearer token.
        header_lines: headers, each as `Name: value`.

    Raises:
        ValueError: a value is invalid; names the load generator's option for it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise ValueError(f"--url is {url!r}; allowed: http[s]://host[:port][/path][?query]")
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith("/v1"):
        path += "/chat/completions" if chat else "/completions"
    elif chat and not path.endswith("/chat/completions"):
        raise ValueError(f"--chat has no effect: --url names the path {path} to POST to")
    if parts.username is not None:
        raise ValueError("--url holds a user name; give it with --header 'Authorization: ...'")
    if parts.query:
        path += f"?{parts.query}"
    tls = None
    if parts.scheme == "https":
        tls = TlsSettings(parts.hostname, None if ca_file is None else str(ca_file), insecure)
        try:
            tls_context(tls)
        except OSError as error:
            raise ValueError(f"--ca-file {ca_file}: {error}") from None
    elif ca_file is not None or insecure:
        raise ValueError("--ca-file and --insecure need an https URL")
    headers = _headers(header_lines, key_variable, key_header)
    try:
        return Target(
            host=parts.hostname,
            port=parts.port or (80 if tls is None else 443),
            path=path,
            headers=headers,
            stream=stream,
            tls=tls,
            finish_reasons=tuple(finish_reasons),
        )
    except ValueError as error:
        raise ValueError(f"--url, --header or --api-key-header: {error}") from None


def _headers(
    lines: Sequence[str], key_variable: str | None, key_header: str | None
) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.strip()
        if not colon:
            # The rest may be a key.
            first = re.split(r"[\s=]", name, maxsplit=1)[0]
            shown = name if first == name else f"{first} ..."
            raise ValueError(f"{shown!r} is not a header; write 'Name: value'")
        if name.lower() in map(str.lower, headers):
            raise ValueError(f"--header: found {name} twice; allowed: once")
        headers[name] = value.strip()
    if key_header is not None:
        if key_variable is None:
            raise ValueError("--api-key-header has no effect without --api-key-env")
        if holds_token(key_header):
            raise ValueError(
                "--api-key-header: found a key (not shown); allowed: the name of the header that"
                " sends it, such as api-key"
            )
    if key_variable is not None:
        name = key_header or "Authorization"
        if name.lower() in map(str.lower, headers):
            raise ValueError(f"--api-key-env has no effect beside --header '{name}: ...'")
        if not key_variable.isidentifier() or holds_token(key_variable):
            raise ValueError(
                "--api-key-env: found no valid variable name (value not shown); allowed: the name"
                " of the environment variable that holds the key"
            )
        key = os.environ.get(key_variable)
        if not key:
            raise ValueError(f"--api-key-env: {key_variable} is not set in the environment")
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"--api-key-env: {key_variable} holds characters beyond printable ASCII"
            )
        headers[name] = key if key_header else f"Bearer {key}"
    return headers


def is_local(host: str) -> bool:
    """Return whether `host` is this machine; False for an unknown host."""
    try:
        known = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, *_, address in known:
        # Without kernel support for the address family, making the socket fails.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)  # only an address of this machine can be bound
            return True
    return False


def find_address(host: str, port: int) -> tuple[int, str, int]:
    """Return an address of `host`, its family, and how many addresses `host` has.

    The first address that accepts a connection is taken, or the first of all if none does.

    Raises:
        LoadGeneratorError: `host` has no address.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LoadGeneratorError(f"host {host!r} has no address: {error}") from None
    for family, *_, address in known if len(known) > 1 else ():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_S)
            if probe.connect_ex(address) == 0:
                return int(family), str(address[0]), len(known)
    family, *_, address = known[0]
    return int(family), str(address[0]), len(known)


def request_head(target: Target) -> str:
    """Return the request's head without the headers that the worker adds to each request."""
    host = _in_url(target.host)
    default_port = 80 if target.tls is None else 443
    headers = {
        "Host": host if target.port == default_port else f"{host}:{target.port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream" if target.stream else "application/json",
        "Accept-Encoding": "identity",
        "User-Agent": USER_AGENT,
    }
    given = {name.lower() for name in target.headers}
    lines = [f"{n}: {v}" for n, v in headers.items() if n.lower() not in given]
    lines += [f"{n}: {v}" for n, v in target.headers.items()]
    return "\r\n".join([f"POST {target.path} HTTP/1.1", *lines]) + "\r\n"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def wait_ready(target: Target, model: str | None, wait_s: float) -> str:
    """Wait until the endpoint answers; return the model to request.

    Sends GET to the list of models that belongs to the path. Every HTTP status means ready, except
    502, 503 and 504, which a proxy returns while a server starts. A model that is not in the list
    gives a warning, since servers have aliases.

    Args:
        model: the user's choice; None for the only model in the list.

    Raises:
        LoadGeneratorError: no answer within `wait_s`, no permission, or the model is ambiguous.
    """
    path = target.path.partition("?")[0]
    base = path.removesuffix("/chat/completions").removesuffix("/completions")
    listed = base != path
    answer = _answer(target, f"{base}/models" if listed else path, wait_s)
    names = _models(answer) if listed else []
    keyless = answer.status_code in (401, 403, 407)
    if answer.status_code == 403 and model is not None:
        # Some keys may send requests and not list models.
        keyless = False
        print(printable(f"warning: {answer.url} answers 403"), file=sys.stderr)
    if keyless or (not names and model is None and _KEY.search(answer.text)):
        raise LoadGeneratorError(
            f"{answer.url} answers {answer.status_code}: {excerpt(answer.content)}; "
            "give a key with --api-key-env or --header, or --model with --no-ready-check"
        )
    hint = ""
    if not listed and answer.status_code == 404:
        hint = (
            f"; requests go to the path {path} unchanged: if it is a base, append /v1 "
            "or the server's API path"
        )
        if model is not None:
            print(printable(f"warning: {answer.url} answers 404{hint}"), file=sys.stderr)
    if model is None:
        if len(names) != 1:
            text = f": {excerpt(answer.content)}".rstrip(": ")
            listed_models = ", ".join(names) or f"no model (status {answer.status_code}{text})"
            raise LoadGeneratorError(
                f"{answer.url} lists {listed_models}; give one with --model{hint}"
            )
        return names[0]
    if names and model not in names:
        print(
            printable(f"warning: {answer.url} names {', '.join(names)}, not {model}"),
            file=sys.stderr,
        )
    return model


def _answer(target: Target, path: str, wait_s: float) -> "httpx.Response":
    import httpx  # takes half of a worker's start-up time, and workers do not need it

    verify = True if target.tls is None else tls_context(target.tls)
    scheme = "http" if target.tls is None else "https"
    url = f"{scheme}://{_in_url(target.host)}:{target.port}{path}"
    given = {"User-Agent": USER_AGENT, **target.headers}
    headers = {n.encode(): value.encode("latin-1") for n, value in given.items()}
    deadline = time.monotonic() + wait_s
    with httpx.Client(verify=verify, headers=headers, trust_env=False, timeout=ANSWER_S) as client:
        while True:
            try:
                answer = client.get(url)
                problem = f"status {answer.status_code}"
                if answer.status_code not in (502, 503, 504):
                    return answer
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() >= deadline:
                raise LoadGeneratorError(f"{url} did not answer within {wait_s:g} s: {problem}")
            time.sleep(PAUSE_S)


def _models(answer: "httpx.Response") -> list[str]:
    if answer.status_code != 200:
        return []
    try:
        return [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
