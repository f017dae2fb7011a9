"""The endpoint: where requests go and what their heads say."""

import contextlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from connector_tax.loadgen.messages import LoadGeneratorError, TlsSettings

PROBE_S = 2.0


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
# The length of each body, and the name of each request, are the load generator's to say.
_OWN_HEADERS = {"content-length", "transfer-encoding", "x-request-id"}


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint; `path` may carry a query.

    Header values (credentials) are sent, and never logged or described.
    """

    host: str
    port: int
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = True
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        if not (self.path.isascii() and self.path.isprintable()) or " " in self.path:
            raise ValueError(f"path {self.path!r} holds characters that must be %-encoded")
        for name, value in self.headers.items():
            if any(character in name + value for character in "\r\n"):
                raise ValueError(f"header {name!r} contains a line break")
            if not _TOKEN(name):
                raise ValueError(f"header name {name!r} is none (letters, digits, - and the like)")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"header {name!r} is set for each request")
            if not all(ord(character) < 256 for character in value):
                raise ValueError(f"header {name!r} holds characters outside Latin-1")

    @property
    def chat(self) -> bool:
        """True for a chat-completions endpoint."""
        return self.path.partition("?")[0].endswith("/chat/completions")


def is_local(host: str) -> bool:
    """True if `host` is this machine; False for an unknown one."""
    try:
        known = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, *_, address in known:
        # A family the kernel does not have cannot even make a socket.
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_STREAM) as probe,
        ):
            probe.bind(address)  # only an address of this machine can be bound
            return True
    return False


def find_address(host: str, port: int) -> tuple[int, str]:
    """The first address of `host` that takes a connection, or its first if none does.

    Raises:
        LoadGeneratorError: it has none.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LoadGeneratorError(f"host {host!r} has no address: {error}") from None
    for family, *_, address in known if len(known) > 1 else ():
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_STREAM) as probe,
        ):
            probe.settimeout(PROBE_S)
            if probe.connect_ex(address) == 0:
                return int(family), str(address[0])
    family, *_, address = known[0]
    return int(family), str(address[0])


def request_head(target: Target) -> str:
    """Return the request head without its per-request headers, which the worker adds."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    default_port = 80 if target.tls is None else 443
    headers = {
        "Host": host if target.port == default_port else f"{host}:{target.port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream" if target.stream else "application/json",
    }
    given = {name.lower() for name in target.headers}
    lines = [f"{n}: {v}" for n, v in headers.items() if n.lower() not in given]
    lines += [f"{n}: {v}" for n, v in target.headers.items()]
    return "\r\n".join([f"POST {target.path} HTTP/1.1", *lines]) + "\r\n"
