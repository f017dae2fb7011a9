"""Reach a server: its address, trusted certificates and API key.

The key is read from the environment whenever it is sent, and recorded nowhere.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property

import httpx

from connector_tax.artifacts.study_records import AccessSection
from connector_tax.loadgen.endpoint import is_local, target_of
from connector_tax.loadgen.http import tls_context
from connector_tax.loadgen.messages import Target

# One connection per request: a server may close the connection after a request that it rejects.
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)
# Wrong answers within this time may come from a server that is still starting.
PATIENCE_S = 5.0
# Part of a TLS error -> what is allowed; the first part that the error has counts.
_REMEDIES = {
    "mismatch, certificate": "a host that the certificate names, or --insecure",
    "CERTIFICATE_VERIFY_FAILED": "--ca-file with the certificates to trust, or --insecure",
    "WRONG_VERSION_NUMBER": "http:// for a server without TLS",
    "record layer failure": "http:// for a server without TLS",
}


@dataclass(frozen=True)
class Endpoint:
    """The base URL of a server, without /v1, with its certificates and key variable."""

    url: str
    access: AccessSection = field(default_factory=lambda: AccessSection())

    def target(self, *, chat: bool = False) -> Target:
        """Return the load generator's target.

        Raises:
            ValueError: the URL, the certificate file or the key variable is unusable.
        """
        trust = self.access if self.url.startswith("https:") else AccessSection()
        return target_of(
            f"{self.url}/v1", chat=chat, key_variable=self.access.get("variable"),
            key_header=self.access.get("header"), ca_file=trust.get("ca_file"),
            insecure=trust.get("insecure", False),
        )  # fmt: skip

    def client(self, timeout_s: float) -> httpx.Client:
        """Return an HTTP client of the server."""
        target = self.target()
        headers = {name.encode(): value.encode("latin-1") for name, value in target.headers.items()}
        return httpx.Client(
            base_url=self.url, headers=headers, trust_env=False, timeout=timeout_s,
            limits=NO_KEEPALIVE, verify=True if target.tls is None else tls_context(target.tls),
        )  # fmt: skip

    @cached_property
    def local(self) -> bool:
        """Return whether the server is on this machine."""
        return is_local(self.target().host)


class ElsewhereError(httpx.ConnectError):
    """A server listens on its port, but at other addresses than the queried one."""


class Waiting:
    """A wait for a server to answer; a wrong answer is reported once it has lasted PATIENCE_S.

    Args:
        url: the server's base address, for errors that do not name it.
        starting: the server was started for this wait, so that at first nothing listens.
    """

    def __init__(self, url: str, *, starting: bool) -> None:
        self.problem = "no answer yet"
        self._kind = ""
        self._url, self._starting = url, starting
        self._since = 0.0
        self.reported = False

    def take(self, answer: httpx.Response | httpx.HTTPError) -> str | None:
        """Record an answer; return its problem if the problem has lasted for PATIENCE_S."""
        lasting = True
        if isinstance(answer, ElsewhereError):
            kind = problem = str(answer)
        elif isinstance(answer, httpx.HTTPError):
            kind = problem = f"{self._url}: {str(answer) or type(answer).__name__}"
            remedy = next((text for part, text in _REMEDIES.items() if part in problem), None)
            if remedy is not None:
                problem += f"; allowed: {remedy}"
            elif isinstance(answer, httpx.ConnectError) and "SSL" not in problem:
                lasting = not self._starting
        else:
            kind = problem = f"{answer.url} answers {answer.status_code}"
            if answer.is_redirect:
                # Each answer may redirect to another address.
                problem += f", a redirect to {answer.headers.get('location')}"
        now = time.monotonic()
        self.problem = problem
        if kind != self._kind or not lasting:
            self._kind, self._since, self.reported = kind, now, False
        if not lasting or self.reported or now - self._since < PATIENCE_S:
            return None
        self.reported = True
        return problem
