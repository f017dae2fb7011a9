"""Inject faults into single requests, at random, or into the launch.

A rule of the file's `faults` map applies by ordinal (`at`, counting from 0 in the order of arrival)
or by seeded chance (`probability`).
"""

import random
from enum import StrEnum
from typing import Annotated, Any, TypedDict

import msgspec

from connector_tax.artifacts.study_records import Share, meta


class FaultKind(StrEnum):
    """The kinds of faults; each comment names the parameters and the effect."""

    COALESCE = "coalesce"  # tokens: number of events in each write
    SPLIT_EVENT = "split_event"  # at_byte: each event in two writes, ms apart
    CRLF = "crlf"  # event lines end in CR LF
    DELAY_HEADERS = "delay_headers"  # ms
    HTTP_429 = "http_429"
    HTTP_500 = "http_500"
    ERROR_EVENT = "error_event"  # after_tokens; an error event, then [DONE]
    FIN = "fin"  # after_tokens; the connection ends in the middle of the body
    RST = "rst"  # after_tokens; the connection is reset
    NO_DONE = "no_done"  # the body ends normally, but without [DONE]
    WRONG_LENGTH = "wrong_length"  # tokens: number above (negative: below) the requested one
    STALL = "stall"  # after_tokens, ms
    PREFIX_HIT = "prefix_hit"  # a false prefix-cache hit is counted
    SLOW_METRICS = "slow_metrics"  # ms; applies to scrapes of /metrics
    MALFORMED_METRICS = "malformed_metrics"  # applies to scrapes of /metrics
    REFUSE_START = "refuse_start"  # the launch fails
    DIE = "die"  # the server kills itself when the request arrives


SCRAPE_KINDS = frozenset({FaultKind.SLOW_METRICS, FaultKind.MALFORMED_METRICS})


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault and the requests or scrapes it applies to."""

    kind: FaultKind  #: kind of fault
    after_tokens: Annotated[int, meta(ge=0)] = 1  #: tokens before it applies
    #: number of tokens: per write (coalesce), or above or below the requested number (wrong_length)
    tokens: int = 0
    at_byte: Annotated[int, meta(ge=0)] = 1  #: byte at which an event is split
    ms: Annotated[float, meta(ge=0, le=600_000)] = 0.0  #: its duration
    #: ordinals of requests that it applies to, from 0 in order of arrival
    at: frozenset[Annotated[int, meta(ge=0)]] = frozenset()
    probability: Share = 0.0  #: probability for each request


class FaultsSection(TypedDict):
    """The faults that the engine injects."""

    seed: int  #: seed of random faults
    rules: list[Rule]


class FaultPlan:
    """The rules of one launch; call it once for each request and each scrape, in order."""

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
        """Return the next request's fault, or None; the first rule that applies is used."""
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
            # Drawn for every rule, so that one rule's result does not shift another's draws.
            chance = self._random.random() < rule.probability
            if struck is None and (chance or ordinal in rule.at):
                struck = rule
        return struck
