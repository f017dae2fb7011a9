"""Resolve the endpoint's address, build the head of its requests, and wait until it answers."""

import contextlib
import re
import socket
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from connector_tax.foreign import printable
from connector_tax.loadgen.http import tls_context
from connector_tax.loadgen.messages import LoadGeneratorError, Target
from connector_tax.loadgen.sse import excerpt

if TYPE_CHECKING:
    import httpx

PROBE_S = 2.0
PAUSE_S = 0.2
ANSWER_S = 10.0
USER_AGENT = f"connector-tax/{version('connector-tax')}"
"""Sent as User-Agent; common firewalls refuse requests without it."""
_KEY = re.compile(r"api[-_ ]?key|unauthori[sz]ed|authenticat|authori[sz]ation|credential", re.I)


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
        model: the user's choice; None: the only model in the list.

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
