"""Claims and their verdicts: what an audit says, one line at a time."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from connector_tax.files import ArtifactError

PASS, FAIL, NOT_CHECKABLE = "PASS", "FAIL", "NOT CHECKABLE"


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing the study claims: its kind, what it is about, the verdict, and why."""

    kind: str
    subject: str
    verdict: str
    message: str


class Ledger:
    """Collects claims in the order they are checked."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def check(self, kind: str, subject: str, problems: Iterable[str], passed: str = "") -> None:
        """FAIL with all `problems`, or PASS where there are none.

        A problem that shows itself by an exception while it is looked for is a FAIL like any other:
        malformed content can raise anything when it is read as if it were well formed.
        """
        wrong: list[str] = []
        try:
            wrong += problems
        except Exception as error:
            wrong.append(message_of(error))
        verdict = FAIL if wrong else PASS
        self.claims.append(Claim(kind, subject, verdict, _joined(wrong) or passed))

    def fail(self, kind: str, subject: str, message: str) -> None:
        """A claim that is wrong."""
        self.claims.append(Claim(kind, subject, FAIL, message))

    def not_checkable(self, kind: str, subject: str, reason: str) -> None:
        """A claim nothing in the folder can confirm or refute."""
        self.claims.append(Claim(kind, subject, NOT_CHECKABLE, reason))

    @contextlib.contextmanager
    def guarded(self, kind: str, subject: str) -> Iterator[None]:
        """Turn what malformed content raises inside the block into a FAIL."""
        try:
            yield
        except Exception as error:
            self.fail(kind, subject, message_of(error))

    def count(self, verdict: str) -> int:
        """How many claims have this verdict."""
        return sum(claim.verdict == verdict for claim in self.claims)


def message_of(error: BaseException) -> str:
    """What an exception says of the content that raised it."""
    if isinstance(error, ArtifactError | OSError):
        return str(error)
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    return f"malformed: {type(error).__name__}: {error}"


def _joined(problems: list[str], most: int = 5) -> str:
    shown = "; ".join(problems[:most])
    return shown + (f"; and {len(problems) - most} more" if len(problems) > most else "")
