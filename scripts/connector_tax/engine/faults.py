"""Fault switches: what can be made to go wrong, for one request, at random, or for the launch.

A rule of the file's `faults` map strikes by ordinal (`at`, counting from 0 in the order of arrival)
or by seeded chance (`probability`).
"""

import random
from enum import StrEnum
from typing import Annotated, Any, TypedDict

import msgspec

from connector_tax.artifacts.study_records import Share, meta


class FaultKind(StrEnum):
    """The closed list; the comment says which parameter applies."""

    COALESCE = "coalesce"  # tokens: so many events in each write
    SPLIT_EVENT = "split_event"  # at_byte: each event in two writes, ms apart
    CRLF = "crlf"  # event lines end in CR LF
    DELAY_HEADERS = "delay_headers"  # ms
    HTTP_429 = "http_429"
    HTTP_500 = "http_500"
    ERROR_EVENT = "error_event"  # after_tokens; an error event, then [DONE]
    FIN = "fin"  # after_tokens; the connection ends in the middle of the body
    RST = "rst"  # after_tokens; the connection is reset
    NO_DONE = "no_done"  # the body ends whole but for its [DONE]
    WRONG_LENGTH = "wrong_length"  # tokens: so many more (or fewer, if negative) than asked for
    STALL = "stall"  # after_tokens, ms
    PREFIX_HIT = "prefix_hit"  # a prefix-cache hit is counted when none is due
    SLOW_METRICS = "slow_metrics"  # ms; strikes scrapes of /metrics
    MALFORMED_METRICS = "malformed_metrics"  # strikes scrapes of /metrics
    REFUSE_START = "refuse_start"  # the launch fails
    DIE = "die"  # the server kills itself when the request arrives


SCRAPE_KINDS = frozenset({FaultKind.SLOW_METRICS, FaultKind.MALFORMED_METRICS})


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of the file, and when it strikes."""

    kind: FaultKind  #: what goes wrong
    after_tokens: Annotated[int, meta(ge=0)] = 1  #: tokens before it strikes
    tokens: int = 0  #: tokens concerned (coalesce), or too many or too few (wrong_length)
    at_byte: Annotated[int, meta(ge=0)] = 1  #: where an event is split
    ms: Annotated[float, meta(ge=0, le=600_000)] = 0.0  #: how long it takes
    #: ordinals it strikes, from 0 in order of arrival
    at: frozenset[Annotated[int, meta(ge=0)]] = frozenset()
    probability: Share = 0.0  #: chance for each


class FaultsSection(TypedDict):
    """The faults that the engine injects."""

    seed: int  #: of the faults that strike by chance
    rules: list[Rule]


class FaultPlan:
    """The rules of one launch, asked once for each request and each scrape in order."""

    def __init__(self, value: dict[str, Any] | None) -> None:
        self._random = random.Random(f"{value['seed']}/faults" if value else "")
        self._rules = msgspec.convert(value["rules"], list[Rule]) if value else []
        self._requests = 0
        self._scrapes = 0

    @property
    def refuses_start(self) -> bool:
        """Return whether the launch must fail at start."""
        return any(rule.kind is FaultKind.REFUSE_START for rule in self._rules)

    def for_request(self) -> Rule | None:
        """Return the next request's fault, or None; the first rule that applies wins."""
        ordinal, self._requests = self._requests, self._requests + 1
        return self._strike(ordinal, scrape=False)

    def for_scrape(self) -> Rule | None:
        """Return the fault of the next scrape of /metrics, or None."""
        ordinal, self._scrapes = self._scrapes, self._scrapes + 1
        return self._strike(ordinal, scrape=True)

    def _strike(self, ordinal: int, *, scrape: bool) -> Rule | None:
        struck: Rule | None = None
        for rule in self._rules:
            if (rule.kind in SCRAPE_KINDS) is not scrape:
                continue
            # Drawn for every rule, so that one rule's outcome does not move another's.
            chance = self._random.random() < rule.probability
            if struck is None and (chance or ordinal in rule.at):
                struck = rule
        return struck
