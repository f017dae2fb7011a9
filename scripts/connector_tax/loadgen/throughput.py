"""Throughput of the measured window: requests that ended and tokens that came in it."""

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from connector_tax.loadgen.messages import RequestRecord

BIN_NS = 1_000_000
PAIR_BYTES = 16
"""Bytes of one read in `RequestRecord.raw_reads`."""
_PENDING = 1 << 17


class TokenTimes:
    """Token counts by the millisecond of arrival; a run is too long to keep every stamp."""

    def __init__(self) -> None:
        self._reads = array("q")  # pairs: stamp in ns, tokens
        self._bins: Counter[int] = Counter()

    def take(self, record: RequestRecord) -> None:
        """Count the tokens of a request, even if it failed or is not measured.

        Where the server counts another number of tokens than the events, each event gets the same
        share of them.
        """
        tokens = record.completion_tokens or 0
        if record.raw_reads is None:
            if record.status == "ok" and tokens and record.t_last_token_ns is not None:
                self._bins[record.t_last_token_ns // BIN_NS] += tokens
            return
        events = record.token_events or 0
        if record.status == "ok" and events and tokens > events:
            stamps, counts = read_pairs(record.raw_reads)
            ends = np.rint(np.cumsum(counts) * (tokens / counts.sum())).astype(np.int64)
            pairs = np.stack([stamps, np.diff(ends, prepend=0)], axis=1)
            self._reads.frombytes(pairs.tobytes())
        else:
            self._reads.frombytes(record.raw_reads)
        if len(self._reads) > _PENDING:
            self._fold()

    def between(self, begin_ns: int, end_ns: int) -> int:
        """Return the number of tokens that came in [begin_ns, end_ns), to a millisecond."""
        self._fold()
        first, last = begin_ns // BIN_NS, -(-end_ns // BIN_NS)
        return sum(tokens for number, tokens in self._bins.items() if first <= number < last)

    def _fold(self) -> None:
        stamps, counts = read_pairs(self._reads.tobytes())
        numbers, where = np.unique(stamps // BIN_NS, return_inverse=True)
        sums = np.bincount(where, weights=counts, minlength=len(numbers))
        for number, tokens in zip(numbers.tolist(), sums.tolist(), strict=True):
            self._bins[number] += round(tokens)
        self._reads = array("q")


def read_pairs(raw_reads: bytes) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]:
    """Return the stamps of the reads in ns, and the number of token events in each."""
    pairs = np.frombuffer(raw_reads, np.int64)
    return pairs[::2], pairs[1::2]


def ended_between(
    records: Sequence[RequestRecord], begin_ns: int, end_ns: int
) -> list[RequestRecord]:
    """Return the successes that ended in [begin_ns, end_ns)."""
    return [
        record
        for record in records
        if record.status == "ok" and begin_ns <= (record.t_done_ns or 0) < end_ns
    ]
