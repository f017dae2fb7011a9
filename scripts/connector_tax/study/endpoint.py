"""Reach a server: its address, the trust in its certificate, and the key that it asks for.

The key is read from the environment wherever it is sent, and recorded nowhere.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property

import httpx

from connector_tax.artifacts.study_records import AccessSection
from connector_tax.loadgen import Target
from connector_tax.loadgen.endpoint import is_local
from connector_tax.loadgen.http import tls_context
from connector_tax.loadgen.setup import target_of

# A connection for each request: a server may close one behind a request that it refuses.
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)
# A wrong answer within this time may come from a server that is starting.
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, without /v1, and how it is reached."""

    url: str
    access: AccessSection = field(default_factory=lambda: AccessSection())

    def target(self, *, chat: bool = False) -> Target:
        """Return what the load generator sends requests to.

        Raises:
            ValueError: the URL, the certificates' file or the key's variable is unusable.
        """
        trust = self.access if self.url.startswith("https:") else AccessSection()
        return target_of(
            f"{self.url}/v1", chat=chat, key_variable=self.access.get("variable"),
            ca_file=trust.get("ca_file"), insecure=trust.get("insecure", False),
        )  # fmt: skip

    def client(self, timeout_s: float) -> httpx.Client:
        """Return a client of the server."""
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


class Waiting:
    """A wait for a server; a wrong answer is reported once it lasts PATIENCE_S."""

    def __init__(self) -> None:
        self.problem = "no answer yet"
        self._since = 0.0
        self.reported = False

    def take(self, answer: httpx.Response | httpx.HTTPError) -> str | None:
        """Take an answer; return the problem where waiting seldom mends it and it has lasted."""
        lasting = False
        if isinstance(answer, httpx.HTTPError):
            problem = str(answer) or type(answer).__name__
            lasting = "SSL" in problem or "CERTIFICATE" in problem.upper()
        else:
            problem = f"{answer.url} answers {answer.status_code}"
            lasting = answer.status_code == httpx.codes.NOT_FOUND
            if answer.is_redirect:
                lasting, problem = True, f"{problem}, a redirect to {answer.headers['location']}"
        now = time.monotonic()
        if problem != self.problem or not lasting:
            self.problem, self._since, self.reported = problem, now, False
        if not lasting or self.reported or now - self._since < PATIENCE_S:
            return None
        self.reported = True
        return problem
