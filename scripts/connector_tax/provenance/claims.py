"""Claims of a study and their verdicts, as an audit prints them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from connector_tax.files import ArtifactError

PASS, FAIL, NOT_CHECKABLE = "PASS", "FAIL", "NOT CHECKABLE"
MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the study: kind, subject, verdict and reason."""

    kind: str
    subject: str
    verdict: str
    message: str


class Ledger:
    """The checked claims, in the order of the checks."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def check(
        self, kind: str, subject: str, problems: Iterable[str], passed: str = "", doubt: str = ""
    ) -> None:
        """Add a claim: PASS without `problems`, else FAIL, or NOT CHECKABLE with a `doubt`.

        An exception while `problems` are collected counts as a problem, because malformed content
        can raise any exception when it is read.
        """
        wrong: list[str] = []
        try:
            wrong += problems
        except Exception as error:
            wrong.append(message_of(error))
        verdict = PASS if not wrong else NOT_CHECKABLE if doubt else FAIL
        shown = [doubt] * bool(doubt) + wrong[:MOST_SHOWN]
        if len(wrong) > MOST_SHOWN:
            shown.append(f"and {len(wrong) - MOST_SHOWN} more")
        self.claims.append(Claim(kind, subject, verdict, "; ".join(shown) if wrong else passed))

    @contextlib.contextmanager
    def guarded(self, kind: str, subject: str) -> Iterator[None]:
        """Turn an exception in the `with` block, as raised by malformed content, into a FAIL."""
        try:
            yield
        except Exception as error:
            self.check(kind, subject, [message_of(error)])

    def count(self, verdict: str) -> int:
        """Return the number of claims with this verdict."""
        return sum(claim.verdict == verdict for claim in self.claims)


def message_of(error: BaseException) -> str:
    """Return the message of an exception that malformed content raised."""
    if isinstance(error, ArtifactError | OSError):
        return str(error)
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    return f"malformed: {type(error).__name__}: {error}"
